"use strict";
// Pictures beside the curves: clients and classes, and what `undrift figures` made.

const hasClients = (section) =>
  section.holdings || section.classes.length || section.groups.some((group) => group.client_accuracies.length);

/** Cards for who holds what, how well clients are served, and what each class lost. */
function clientCards(section, view, onclasses) {
  const cards = [];
  const add = (title, tools, draw, text) => {
    const canvas = chartBox(title);
    cards.push({
      canvas,
      draw,
      card: make(
        "figure",
        {class: "card"},
        make("div", {class: "bar"}, make("h3", {}, title), tools),
        canvas,
        make("figcaption", {class: "faint"}, text),
      ),
    });
  };
  const spread = section.groups
    .map((group, place) => ({group, place}))
    .filter(({group, place}) => group.client_accuracies.length && view.groups.includes(place));
  if (spread.length) {
    const lines = spread.map(({group, place}) => {
      const levels = group.client_accuracies;
      const share = levels.map((level, k) => (100 * k) / (levels.length - 1));
      return {label: group.label, key: group.label, place, x: share, y: levels, low: levels, high: levels};
    });
    const title = "Accuracy of the clients, from the worst to the best";
    add(
      title,
      null,
      (canvas) =>
        drawChart(canvas, lines, {
          title,
          x: {label: "share of the clients, %", short: "share", unit: ""},
          y: {label: "accuracy on own training samples", unit: ""},
          zoom: null,
        }),
      "The server's model on each client's own training samples, at the last round that measured it; mean over seeds.",
    );
  }
  if (section.classes.length) {
    const [k, what] = view.classes;
    const table = section.classes[k] || section.classes[0];
    const values = table[what];
    const most = what === "accuracy" ? 1 : Math.max(0.05, ...values.flat().filter((value) => value != null));
    const label = section.groups[table.group].label;
    const title = `${capital(what)} of each class: ${label}`;
    const tools = [
      chooser(
        "Method",
        section.classes.map((each, place) => [place, section.groups[each.group].label]),
        k,
        (value) => onclasses([Number(value), what]),
      ),
      chooser(
        "Show",
        [
          ["forgetting", "forgetting"],
          ["accuracy", "accuracy"],
        ],
        what,
        (value) => onclasses([k, value]),
      ),
    ];
    add(
      title,
      tools,
      (canvas) =>
        drawGrid(canvas, {
          title,
          values,
          most,
          paint: what === "accuracy" ? "line-0" : "line-1",
          columns: table.rounds.map(String),
          rows: values.map((row, c) => String(c)),
          columnLabel: "round",
          rowLabel: "class",
          columnName: "round",
          rowName: "class",
          say: (value) => `${what} ${shown(value)}`,
        }),
      what === "accuracy"
        ? `Test accuracy of each class; the darkest colour is 1. Mean over seeds.`
        : `The best test accuracy so far minus the current one; the darkest colour is ${shown(most)}. Mean over seeds.`,
    );
  }
  if (section.holdings) {
    const {counts, names, seed, clients} = section.holdings;
    const values = counts[0].map((_, c) => counts.map((row) => row[c]));
    const most = Math.max(1, ...values.flat());
    const title = "Samples of each class at each client";
    const which =
      clients > counts.length ? `The first ${counts.length} of ${clients} clients` : `All ${counts.length} clients`;
    add(
      title,
      null,
      (canvas) =>
        drawGrid(canvas, {
          title,
          values,
          most,
          paint: "line-2",
          columns: names || counts.map((_, k) => String(k)),
          rows: values.map((row, c) => String(c)),
          columnLabel: "client",
          rowLabel: "class",
          columnName: "client",
          rowName: "class",
          say: (value) => `${value} samples`,
        }),
      `${which}, seed ${seed}; the darkest colour is ${most} samples.`,
    );
  }
  return cards;
}

/** What `undrift figures` made of a run; the charts are drawn when they are in the page. */
function drawingParts(figures) {
  const charts = ["map", "surface"]
    .filter((kind) => figures[kind])
    .map((kind) => make("figure", {class: "card", "data-drawing": kind}));
  const pictures = (figures.gallery || []).map(({text, png}) =>
    make("figure", {class: "card"}, make("img", {src: png, alt: text}), make("figcaption", {}, text)),
  );
  const note =
    "The test picture with the median Dice of every site: plain, with the outlines by experts, and with those by the model. The Dice scores are those of the structures in their order.";
  return make(
    "div",
    {class: "drawings"},
    make("h3", {class: "part"}, `${figures.label}: models and pictures`),
    make("div", {class: "charts"}, charts),
    make("div", {class: "charts"}, pictures),
    pictures.length ? make("p", {class: "faint"}, note) : null,
  );
}

function drawDrawings(host, section) {
  host.querySelectorAll(".drawings").forEach((part, k) => {
    const figures = section.drawings[k];
    for (const card of part.querySelectorAll("[data-drawing]")) {
      const near = figures.surface;
      const map = card.dataset.drawing === "map";
      const title = map
        ? "Features of the selector, t-SNE, test samples by site"
        : `Loss near the models on ${near.site}, along random directions`;
      const canvas = chartBox(title);
      const bar = make("div", {class: "bar"}, make("h3", {}, title));
      const keys = map ? figures.sites : Object.keys(near.losses);
      card.append(
        bar,
        canvas,
        make(
          "figcaption",
          {class: "keys"},
          keys.map((key, place) => make("span", {class: "key"}, swatch(place), key)),
        ),
      );
      const chart = map
        ? drawDots(canvas, figures.map, figures.sites, title)
        : drawChart(
            canvas,
            keys.map((label, place) => ({
              label,
              key: label,
              place,
              x: near.distance,
              y: near.losses[label].mean,
              low: near.losses[label].low,
              high: near.losses[label].high,
            })),
            {
              title,
              x: {label: "distance, share of the model's length", short: "distance", unit: ""},
              y: {label: "test loss", unit: ""},
              zoom: null,
            },
          );
      bar.append(chart.savers);
    }
  });
}

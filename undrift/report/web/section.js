"use strict";
// One section of the report: the runs of one task, as a table, curves, and pictures of clients and classes.

const FIRST_CHARTS = 4;
const MANY_GROUPS = 12; // with more, the legend can be searched

/** What a section shows before anybody has touched it. */
function firstView(section) {
  return {
    axis: "round", seeds: "band", smooth: 0, logX: false, zoom: null, sort: null, against: 0,
    groups: section.shown.slice(),
    measures: section.measures.slice(0, FIRST_CHARTS).map((measure) => measure.key),
    logY: section.measures.filter((measure) => measure.log).map((measure) => measure.key),
    classes: [0, "forgetting"],
  };
}

// How each part of a view is written in the page's address, and read from it: [name, write, read].
const list = [(value) => value.join(","), (text) => text.split(",").filter(Boolean)];
const numbers = [list[0], (text) => list[1](text).map(Number).filter(Number.isInteger)];
const ADDRESS = {
  axis: ["x", String, String], seeds: ["seeds", String, String], smooth: ["smooth", String, Number],
  logX: ["lx", Number, (text) => text === "1"], against: ["vs", String, Number], groups: ["on", ...numbers],
  measures: ["y", ...list], logY: ["ly", ...list],
  zoom: ["z", (range) => (range ? range.map((end) => Number(end.toPrecision(6))).join(":") : ""),
    (text) => { const ends = text.split(":").map(Number); return ends.length === 2 && ends[0] < ends[1] ? ends : null; }],
  sort: ["sort", (by) => (by ? `${by[0]}${by[1] ? "d" : "u"}` : ""),
    (text) => { const by = /^(\d+)([du])$/.exec(text); return by ? [Number(by[1]), by[2] === "d"] : null; }],
  classes: ["class", (by) => by.join(":"), (text) => { const [k, what] = text.split(":"); return [Number(k), what]; }],
};

/** A view as entries of the address: only what is not as at first. */
function viewEntries(section, view) {
  const first = firstView(section);
  return Object.entries(ADDRESS).map(([part, [name, write]]) => [name, String(write(view[part])), String(write(first[part]))])
    .filter(([, now, before]) => now !== before).map(([name, now]) => [name, now]);
}

/** The view that entries of an address describe; what makes no sense is as at first. */
function viewFrom(section, entries) {
  const view = firstView(section);
  const known = {
    axis: (axis) => axis === "round" || section.axes.some((each) => each.key === axis),
    seeds: (seeds) => ["band", "mean", "single"].includes(seeds),
    smooth: (share) => share >= 0 && share <= 0.98,
    against: (k) => section.tests.groups[k] !== undefined,
    groups: (places) => places.every((place) => section.groups[place]),
    measures: (keys) => keys.every((key) => section.measures.some((each) => each.key === key)),
    logY: (keys) => keys.every((key) => section.measures.some((each) => each.key === key)),
    classes: ([k, what]) => section.classes[k] && ["forgetting", "accuracy"].includes(what),
  };
  for (const [part, [name, , read]] of Object.entries(ADDRESS)) {
    if (!entries.has(name)) continue;
    const value = read(entries.get(name));
    if (!known[part] || known[part](value)) view[part] = value;
  }
  return view;
}

/** Draw a section into `host`, under its own title unless it is alone; onview is told of every change of the view. Returns {view, redraw}. */
function drawSection(host, section, number, alone, view, onview) {
  const drawn = []; // charts to be destroyed before they are drawn anew
  const tableHost = make("div", {});
  const chartHost = make("div", {class: "charts"});
  const clientHost = make("div", {class: "charts narrow"});
  const change = (changes, ...parts) => {
    Object.assign(view, changes);
    onview();
    for (const part of parts) part();
  };

  const showTable = () => {
    const table = comparedTable(section, view.against);
    const sort = (by) => {
      change({sort: by}, showTable);
      tableHost.querySelectorAll("button.sort")[by[0]].focus();
    };
    const drawnTable = drawTable(table, view.sort, sort, (place) => place);
    tableHost.replaceChildren(make("div", {class: "bar"}, againstChooser(section, view, change, showTable), tableSavers(table)),
      drawnTable, make("p", {class: "faint"}, table.legend));
  };

  const showCharts = () => {
    drawn.splice(0).forEach((chart) => chart.destroy());
    const axis = section.axes.find((each) => each.key === view.axis);
    const x = {label: axis ? axis.label : "round", short: axis ? axis.key : "round", whole: !axis && !view.logX, unit: axis && axis.key === "bytes" ? "bytes" : "", log: view.logX};
    const cards = view.measures.map((key) => {
      const measure = section.measures.find((each) => each.key === key);
      const log = view.logY.includes(key);
      const title = `${capital(measure.label)} over ${axis ? (axis.key === "network" ? "network time" : axis.key) : "rounds"}`;
      const canvas = chartBox(title);
      const card = make("figure", {class: "card"}, make("div", {class: "bar"}, make("h3", {}, title),
        checkbox("log", log, (on) => change({logY: on ? [...view.logY, key] : view.logY.filter((each) => each !== key)}, showCharts))), canvas);
      return {card, canvas, key, plot: {
        title, x, y: {label: measure.label.split(":")[0], unit: key.startsWith("bytes") ? "bytes" : "", log}, zoom: view.zoom,
        onzoom: (zoom) => change({zoom}, showCharts), sync: `section-${number}`, band: view.seeds === "band",
        smoothed: view.smooth > 0,
      }};
    });
    chartHost.replaceChildren(...cards.map(({card}) => card));
    for (const {card, canvas, key, plot} of cards) {
      const chart = drawChart(canvas, linesOf(section, view, key, plot.y.log), plot);
      card.firstChild.append(chart.savers);
      drawn.push(chart);
    }
    zoomButtons.reset.disabled = !view.zoom;
    showClients();
  };

  const showClients = () => {
    const cards = clientCards(section, view, (classes) => change({classes}, showCharts));
    clientHost.replaceChildren(...cards.map(({card}) => card));
    for (const {card, canvas, draw} of cards) {
      const chart = draw(canvas);
      card.firstChild.append(chart.savers);
      drawn.push(chart);
    }
  };

  const zoomButtons = zoomControls(() => section, view, change, () => showCharts());
  const charts = section.measures.length > 0;
  host.replaceChildren(
    make("h2", {id: `section-${number}`, tabindex: "-1"}, alone ? "Results" : section.title),
    make("p", {class: "verdict"}, section.verdict),
    make("div", {class: "card"}, tableHost),
    ...(charts ? [make("h3", {class: "part"}, "Curves"), controls(section, view, change, showCharts, zoomButtons), legend(section, view, change, showCharts),
      chartHost, make("p", {class: "faint"}, curveNotes(section))] : []),
    ...(hasClients(section) ? [make("h3", {class: "part"}, "Clients and classes"), clientHost] : []),
    ...section.tables.map((table) => plainTable(table)),
    ...section.drawings.map((figures) => drawingParts(figures)),
    settingsPart(section),
  );
  showTable();
  if (charts) showCharts();
  else showClients();
  drawDrawings(host, section);
  return {redraw: charts ? showCharts : showClients};
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** A place for a chart that the keyboard reaches. */
function chartBox(title) {
  const about = `Chart: ${title}. Arrow keys read its values.`;
  return make("div", {class: "chart", tabindex: "0", role: "group", "aria-label": about});
}

/** The table of results with two more columns: the difference to one of the methods, and its p value. */
function comparedTable(section, against) {
  const {groups, rows} = section.tests;
  const row = rows[against];
  if (!row || !row.some((each) => each)) return section.table;
  const reference = section.groups[groups[against]].label;
  const cells = section.groups.map((group, place) => {
    const found = row[groups.indexOf(place)];
    if (!found) return [["", null], ["", null]];
    const [mean, p, seeds] = found;
    const sign = mean > 0 ? "+" : mean < 0 ? "−" : "";
    const text = p == null ? "–" : p < 0.001 ? "< 0.001" : String(Number(p.toPrecision(2)));
    return [[`${sign}${Math.abs(mean).toFixed(4)}`, mean], [seeds > 1 && p != null ? `${text} (${seeds} seeds)` : "–", p]];
  });
  const score = section.table.columns.findIndex((column) => column.better) + 1; // they come after the score
  const put = (cells, more) => [...cells.slice(0, score), ...more, ...cells.slice(score)];
  return {
    title: section.table.title,
    columns: put(section.table.columns, [{name: `difference to ${reference}`, better: ""}, {name: "p", better: ""}]),
    rows: section.table.rows.map((each, place) => put(each, cells[place])),
    legend: `${section.table.legend} Differences are those of the ${section.metric.score}; p: ${section.tests.name}. `
      + "A dash stands for fewer than two shared seeds, or for seeds that do not differ.",
  };
}

function againstChooser(section, view, change, showTable) {
  const {groups, rows} = section.tests;
  if (!rows.some((row) => row.some((each) => each))) return make("span", {});
  const options = groups.map((place, k) => [k, section.groups[place].label]);
  return chooser("Compare with", options, view.against, (value) => change({against: Number(value)}, showTable));
}

function controls(section, view, change, showCharts, zoomButtons) {
  const axes = [["round", "rounds"], ...section.axes.map((axis) => [axis.key, axis.label])];
  const seeds = [["band", "mean and range of seeds"], ["mean", "mean of seeds"], ["single", "every seed"]];
  const told = make("output", {}, view.smooth.toFixed(2));
  const slider = make("input", {type: "range", min: "0", max: "0.98", step: "0.02", value: view.smooth, oninput: () => {
    told.textContent = Number(slider.value).toFixed(2);
    change({smooth: Number(slider.value)}, showCharts);
  }});
  const boxes = section.measures.map((measure) => checkbox(measure.label, view.measures.includes(measure.key), (on) => {
    const keys = section.measures.map((each) => each.key).filter((key) => (key === measure.key ? on : view.measures.includes(key)));
    change({measures: keys}, showCharts);
  }));
  return make("div", {class: "controls"},
    chooser("Over", axes, view.axis, (axis) => change({axis, zoom: null}, showCharts)),
    chooser("Seeds", seeds, view.seeds, (value) => change({seeds: value}, showCharts)),
    make("label", {}, make("span", {}, "Smoothing"), slider, told),
    checkbox("log x", view.logX, (logX) => change({logX}, showCharts)),
    zoomButtons.element,
    make("details", {class: "menu"}, make("summary", {}, "Charts"), make("div", {class: "choices"}, boxes)));
}

/** Buttons that do what dragging does. */
function zoomControls(sectionOf, view, change, showCharts) {
  const range = () => {
    const lines = view.measures.flatMap((key) => linesOf(sectionOf(), view, key, false));
    return view.zoom || [Math.min(...lines.map((each) => each.x[0])), Math.max(...lines.map((each) => each.x[each.x.length - 1]))];
  };
  const zoom = () => {
    const [from, to] = range();
    if (!(from < to)) return;
    const quarter = (to - from) / 4;
    change({zoom: view.logX ? [from * (to / from) ** 0.25, to / (to / from) ** 0.25] : [from + quarter, to - quarter]}, showCharts);
  };
  const closer = make("button", {type: "button", onclick: zoom}, "Zoom in");
  const reset = make("button", {type: "button", disabled: !view.zoom, onclick: () => { change({zoom: null}, showCharts); closer.focus(); }}, "Show all");
  return {element: make("span", {class: "zoom", role: "group", "aria-label": "Zoom"}, closer, reset), reset};
}

/** A check box with its line for each group; many groups can be searched. */
function legend(section, view, change, showCharts) {
  const entries = section.groups.map((group, place) => {
    const box = make("input", {type: "checkbox", checked: view.groups.includes(place), onchange: () => choose(places().filter((k) => k !== place).concat(box.checked ? place : []))});
    return {box, place, element: make("label", {class: "key"}, box, swatch(place), make("span", {}, group.label)), label: group.label.toLowerCase()};
  });
  const places = () => view.groups;
  const choose = (groups) => {
    change({groups: groups.slice().sort((a, b) => a - b)}, showCharts);
    for (const entry of entries) entry.box.checked = view.groups.includes(entry.place);
  };
  const all = entries.map((entry) => entry.place);
  const button = (text, groups) => make("button", {type: "button", class: "small", onclick: () => choose(groups())}, text);
  const bar = make("span", {class: "savers"}, button("all", () => visible()), button("none", () => []), button("as at first", () => section.shown));
  const visible = () => (entries.some((entry) => !entry.element.hidden) ? entries.filter((entry) => !entry.element.hidden).map((entry) => entry.place) : all);
  const many = entries.length > MANY_GROUPS;
  const search = make("input", {type: "search", placeholder: "find a method", "aria-label": "Find a method", oninput: () => {
    for (const entry of entries) entry.element.hidden = !entry.label.includes(search.value.toLowerCase());
  }});
  const keys = make("div", many ? {class: "keys many", tabindex: "0", role: "group", "aria-label": "Methods"} : {class: "keys", role: "group", "aria-label": "Methods"},
    entries.map((entry) => entry.element));
  return make("div", {class: "legend"}, many ? make("div", {class: "bar"}, search, bar) : null, keys, many ? null : bar);
}

function curveNotes(section) {
  const notes = ["Bands go from the lowest seed to the highest; a mean ends where the first of its seeds ends. Drag across a chart to zoom, double-click to see all of it; with the keyboard, arrows read values, + and − zoom, 0 shows all."];
  if (section.points) notes.push(`Curves are thinned to about ${section.points} points: of each stretch of rounds the lowest and the highest mean are kept. Tables use every round.`);
  if (section.groups.some((group) => group.runs.length > 1)) notes.push(`At most ${MOST_LINES} lines are drawn in a chart.`);
  if (section.undrawn.length) notes.push(`Not drawn, to keep the page small: ${section.undrawn.join(", ")}.`);
  return notes.join(" ");
}

const hasClients = (section) => section.holdings || section.classes.length || section.groups.some((group) => group.client_accuracies.length);

/** Cards for who holds what, how well clients are served, and what each class lost. */
function clientCards(section, view, onclasses) {
  const cards = [];
  const add = (title, tools, draw, text) => {
    const canvas = chartBox(title);
    cards.push({canvas, draw, card: make("figure", {class: "card"}, make("div", {class: "bar"}, make("h3", {}, title), tools), canvas, make("figcaption", {class: "faint"}, text))});
  };
  const spread = section.groups.map((group, place) => ({group, place})).filter(({group, place}) => group.client_accuracies.length && view.groups.includes(place));
  if (spread.length) {
    const lines = spread.map(({group, place}) => {
      const levels = group.client_accuracies;
      const share = levels.map((level, k) => (100 * k) / (levels.length - 1));
      return {label: group.label, key: group.label, place, x: share, y: levels, low: levels, high: levels};
    });
    const title = "Accuracy of the clients, from the worst to the best";
    add(title, null, (canvas) => drawChart(canvas, lines, {
      title, x: {label: "share of the clients, %", short: "share", unit: ""}, y: {label: "accuracy on own training samples", unit: ""}, zoom: null,
    }), "The server's model on each client's own training samples, at the last round that measured it; mean over seeds.");
  }
  if (section.classes.length) {
    const [k, what] = view.classes;
    const table = section.classes[k] || section.classes[0];
    const values = table[what];
    const most = what === "accuracy" ? 1 : Math.max(0.05, ...values.flat().filter((value) => value != null));
    const label = section.groups[table.group].label;
    const title = `${capital(what)} of each class: ${label}`;
    const tools = [
      chooser("Method", section.classes.map((each, place) => [place, section.groups[each.group].label]), k, (value) => onclasses([Number(value), what])),
      chooser("Show", [["forgetting", "forgetting"], ["accuracy", "accuracy"]], what, (value) => onclasses([k, value])),
    ];
    add(title, tools, (canvas) => drawGrid(canvas, {
      title, values, most, paint: what === "accuracy" ? "line-0" : "line-1", columns: table.rounds.map(String), rows: values.map((row, c) => String(c)),
      columnLabel: "round", rowLabel: "class", columnName: "round", rowName: "class", say: (value) => `${what} ${shown(value)}`,
    }), what === "accuracy" ? `Test accuracy of each class; full colour is 1. Mean over seeds.`
      : `The best test accuracy so far minus the present one; full colour is ${shown(most)}. Mean over seeds.`);
  }
  if (section.holdings) {
    const {counts, names, seed, clients} = section.holdings;
    const values = counts[0].map((_, c) => counts.map((row) => row[c]));
    const most = Math.max(1, ...values.flat());
    const title = "Samples of each class at each client";
    const which = clients > counts.length ? `The first ${counts.length} of ${clients} clients` : `All ${counts.length} clients`;
    add(title, null, (canvas) => drawGrid(canvas, {
      title, values, most, paint: "line-2", columns: names || counts.map((_, k) => String(k)), rows: values.map((row, c) => String(c)),
      columnLabel: "client", rowLabel: "class", columnName: "client", rowName: "class", say: (value) => `${value} samples`,
    }), `${which} under seed ${seed}; full colour is ${most} samples.`);
  }
  return cards;
}

/** A table that is sorted by itself and keeps that to itself. */
function plainTable(table) {
  const host = make("div", {class: "card"});
  const show = (sort) => {
    host.replaceChildren(make("div", {class: "bar"}, make("h3", {}, table.title), tableSavers(table)), drawTable(table, sort, (by) => {
      show(by);
      host.querySelectorAll("button.sort")[by[0]].focus();
    }), make("p", {class: "faint"}, table.legend));
  };
  show(null);
  return host;
}

/** What `undrift figures` made of a run; the charts are drawn when they are in the page. */
function drawingParts(figures) {
  const charts = ["map", "surface"].filter((kind) => figures[kind]).map((kind) => make("figure", {class: "card", "data-drawing": kind}));
  const pictures = (figures.gallery || []).map(({text, png}) => make("figure", {class: "card"}, make("img", {src: png, alt: text}), make("figcaption", {}, text)));
  const note = "The test picture with the median Dice of every site: plain, with the outlines by experts, and with those by the model. The Dice scores are those of the structures in their order.";
  return make("div", {class: "drawings"}, make("h3", {class: "part"}, `${figures.label}: models and pictures`),
    make("div", {class: "charts"}, charts), make("div", {class: "charts"}, pictures), pictures.length ? make("p", {class: "faint"}, note) : null);
}

function drawDrawings(host, section) {
  host.querySelectorAll(".drawings").forEach((part, k) => {
    const figures = section.drawings[k];
    for (const card of part.querySelectorAll("[data-drawing]")) {
      const near = figures.surface;
      const map = card.dataset.drawing === "map";
      const title = map ? "Features of the selector, t-SNE, test samples by site" : `Loss near the models on ${near.site}, along random directions`;
      const canvas = chartBox(title);
      const bar = make("div", {class: "bar"}, make("h3", {}, title));
      const keys = map ? figures.sites : Object.keys(near.losses);
      card.append(bar, canvas, make("figcaption", {class: "keys"}, keys.map((key, place) => make("span", {class: "key"}, swatch(place), key))));
      const chart = map ? drawDots(canvas, figures.map, figures.sites, title)
        : drawChart(canvas, keys.map((label, place) => ({label, key: label, place, x: near.distance, y: near.losses[label].mean, low: near.losses[label].low, high: near.losses[label].high})),
          {title, x: {label: "distance, share of the model's length", short: "distance", unit: ""}, y: {label: "test loss", unit: ""}, zoom: null});
      bar.append(chart.savers);
    }
  });
}

/** Settings and commands, folded. */
function settingsPart(section) {
  const names = [...new Set(section.groups.flatMap((group) => Object.keys(group.settings)))].filter((name) => name !== "algorithm");
  const table = {
    title: "Settings that differ", legend: "",
    columns: ["method", ...names].map((name) => ({name, better: ""})),
    rows: section.groups.map((group) => [[group.label], ...names.map((name) => [group.settings[name] ?? ""])]),
  };
  const hidden = section.settings.defaults;
  return make("details", {class: "fold"},
    make("summary", {}, "Settings, and how to run it again"),
    make("p", {class: "faint"}, `Shared by all runs${hidden ? `; ${hidden} settings at their defaults are not shown (run.toml has all of them)` : ""}.`),
    pairs(section.settings.shared),
    names.length ? make("h3", {}, "What differs") : null, names.length ? drawStatic(table) : null,
    make("h3", {}, "Commands"),
    section.groups.map((group) => make("details", {}, make("summary", {}, group.label), group.commands.map((text) => make("pre", {tabindex: "0"}, text)))));
}

const drawStatic = (table) => {
  const host = make("div", {});
  const show = (sort) => host.replaceChildren(drawTable(table, sort, show));
  show(null);
  return host;
};

function pairs(entries) {
  return make("dl", {}, Object.entries(entries).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value || "–"))));
}

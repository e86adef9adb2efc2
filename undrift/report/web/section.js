"use strict";
// One section of the report: the runs of one task, as a table, curves, and pictures of clients and classes.

const MANY_GROUPS = 12; // with more, the legend can be searched

/**
 * Draw a section into `host`, under `heading`; onview is told of every change. Returns {redraw, destroy,
 * update}; update(next) shows a section of the same shape with other numbers.
 */
function drawSection(host, section, number, heading, view, onview) {
  const drawn = []; // charts of curves, to be destroyed before they are drawn anew
  const pictures = []; // the same of clients and classes
  let pictured = ""; // what these show
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
    tableHost.replaceChildren(
      make("div", {class: "bar"}, againstChooser(section, view, change, showTable), tableSavers(table)),
      drawnTable,
      make("p", {class: "faint"}, table.legend),
    );
  };

  const showCharts = () => {
    drawn.splice(0).forEach(({chart}) => chart.destroy());
    const axis = section.axes.find((each) => each.key === view.axis);
    const x = {
      label: axis ? axis.label : "round",
      short: axis ? axis.key : "round",
      whole: !axis && !view.logX,
      unit: axis && axis.key === "bytes" ? "bytes" : "",
      log: view.logX,
    };
    const cards = view.measures.map((key) => {
      const measure = section.measures.find((each) => each.key === key);
      const log = view.logY.includes(key);
      const title = `${capital(measure.label)} over ${axis ? (axis.key === "network" ? "network time" : axis.key) : "rounds"}`;
      const canvas = chartBox(title);
      const card = make(
        "figure",
        {class: "card"},
        make(
          "div",
          {class: "bar"},
          make("h3", {}, title),
          checkbox("log", log, (on) =>
            change({logY: on ? [...view.logY, key] : view.logY.filter((each) => each !== key)}, showCharts),
          ),
        ),
        canvas,
      );
      return {
        card,
        canvas,
        key,
        plot: {
          title,
          x,
          y: {label: measure.label.split(":")[0], unit: key.startsWith("bytes") ? "bytes" : "", log},
          zoom: view.zoom,
          onzoom: (zoom) => change({zoom}, showCharts),
          sync: `section-${number}`,
          band: view.seeds === "band",
          smoothed: view.smooth > 0,
        },
      };
    });
    chartHost.replaceChildren(...cards.map(({card}) => card));
    for (const {card, canvas, key, plot} of cards) {
      const chart = drawChart(canvas, linesOf(section, view, key, plot.y.log), plot);
      card.firstChild.append(chart.savers);
      drawn.push({chart, key, log: plot.y.log});
    }
    zoomButtons.reset.disabled = !view.zoom;
    showClients();
  };

  const showClients = () => {
    pictures.splice(0).forEach((chart) => chart.destroy());
    pictured = picturedOf(section);
    const cards = clientCards(section, view, (classes) => change({classes}, showCharts));
    clientHost.replaceChildren(...cards.map(({card}) => card));
    for (const {card, canvas, draw} of cards) {
      const chart = draw(canvas);
      card.firstChild.append(chart.savers);
      pictures.push(chart);
    }
  };

  const zoomButtons = zoomControls(
    () => section,
    view,
    change,
    () => showCharts(),
  );
  const charts = section.measures.length > 0;
  const tiles = make("div", {class: "tiles"}, headline(section));
  const verdict = make("p", {class: "verdict"}, section.verdict);
  const notes = make("p", {class: "faint"}, curveNotes(section));
  const tables = section.tables.map((table) => plainTable(table));
  host.replaceChildren(
    make("h2", {id: `section-${number}`, tabindex: "-1"}, heading),
    tiles,
    verdict,
    make("div", {class: "card"}, tableHost),
    ...(charts
      ? [
          make("h3", {class: "part"}, "Curves"),
          controls(section, view, change, showCharts, zoomButtons),
          legend(section, view, change, showCharts),
          chartHost,
          notes,
        ]
      : []),
    ...(hasClients(section) ? [make("h3", {class: "part"}, "Clients and classes"), clientHost] : []),
    ...tables.map((table) => table.element),
    ...section.drawings.map((figures) => drawingParts(figures)),
    settingsPart(section),
  );
  showTable();
  if (charts) showCharts();
  else showClients();
  drawDrawings(host, section);
  const update = (next) => {
    Object.assign(section, next);
    tiles.replaceChildren(...headline(section));
    verdict.textContent = section.verdict;
    notes.textContent = curveNotes(section);
    showTable();
    tables.forEach((table, k) => table.update(section.tables[k]));
    const kept = drawn.every(({chart, key, log}) => chart.update(linesOf(section, view, key, log)));
    if (!kept) showCharts();
    else if (pictured !== picturedOf(section)) showClients();
  };
  const destroy = () => [...drawn.map(({chart}) => chart), ...pictures].forEach((chart) => chart.destroy());
  return {redraw: charts ? showCharts : showClients, update, destroy};
}

/** The best method, its lead, and how much was run, as tiles. */
function headline(section) {
  const {table, tests, groups, metric} = section;
  const column = table.columns.findIndex((each) => each.better);
  const score = ([, row]) => valueOf(row[column]);
  const order = table.rows
    .map((row, place) => [place, row])
    .filter((each) => typeof score(each) === "number")
    .sort((a, b) => (metric.better === "higher" ? score(b) - score(a) : score(a) - score(b)));
  const runs = groups.reduce((sum, group) => sum + group.runs.length, 0);
  const some = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
  const methods = new Set(groups.map((group) => group.algorithm)).size;
  const tiles = [tile(some(runs, "run"), some(groups.length, methods === groups.length ? "method" : "setting"))];
  if (!order.length) return tiles;
  const [[best, row], next] = order;
  tiles.unshift(tile(metric.score, textOf(row[column]), "", groups[best].label));
  tiles[0].lastChild.prepend(swatch(best));
  tiles[0].classList.add("first");
  const lead = next && tests.rows[tests.groups.indexOf(best)]?.[tests.groups.indexOf(next[0])]; // as in the table
  if (lead) {
    const [mean, p, seeds] = lead;
    const sure = p == null ? "" : `p ${p < 0.001 ? "< 0.001" : `= ${Number(p.toPrecision(2))}`}, ${some(seeds, "seed")}`;
    const size = Math.abs(mean).toFixed(4);
    const ahead = mean < 0 === (metric.better === "higher"); // over the seeds of both it may be behind
    const where = `${ahead ? "ahead of" : "behind"} ${groups[next[0]].label}`;
    tiles.splice(1, 0, Number(size) ? tile(where, size, "", sure) : tile(`with ${groups[next[0]].label}`, "level", "", sure));
  }
  return tiles;
}

/** What the pictures of clients and classes show. */
const picturedOf = (section) =>
  JSON.stringify([section.holdings, section.classes, section.groups.map((group) => group.client_accuracies)]);

/** What of a section decides which parts it has; with another shape it is drawn anew. */
const shapeOf = (section) =>
  JSON.stringify([
    section.title,
    section.groups.map((group) => [group.label, group.runs.length, group.settings, group.client_accuracies.length > 0]),
    [section.measures, section.axes, section.undrawn, section.settings, section.drawings.length, section.metric],
    [section.table.columns.length, section.tables.map((table) => table.title)],
    [section.holdings === null, section.classes.map((each) => each.group)],
    section.tests.groups,
  ]);

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
    if (!found)
      return [
        ["", null],
        ["", null],
      ];
    const [mean, p, seeds] = found;
    const sign = mean > 0 ? "+" : mean < 0 ? "−" : "";
    const text = p == null ? "–" : p < 0.001 ? "< 0.001" : String(Number(p.toPrecision(2)));
    return [
      [`${sign}${Math.abs(mean).toFixed(4)}`, mean],
      [seeds > 1 && p != null ? `${text} (${seeds} seeds)` : "–", p],
    ];
  });
  const score = section.table.columns.findIndex((column) => column.better) + 1; // they come after the score
  const put = (cells, more) => [...cells.slice(0, score), ...more, ...cells.slice(score)];
  return {
    title: section.table.title,
    columns: put(section.table.columns, [
      {name: `difference to ${reference}`, better: ""},
      {name: "p", better: ""},
    ]),
    rows: section.table.rows.map((each, place) => put(each, cells[place])),
    legend:
      `${section.table.legend} Differences are those of the ${section.metric.score}; p: ${section.tests.name}. ` +
      "A dash means fewer than two shared seeds, or a difference that is the same in every seed.",
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
  const seeds = [
    ["band", "mean and range of seeds"],
    ["mean", "mean of seeds"],
    ["single", "every seed"],
  ];
  const told = make("output", {}, view.smooth.toFixed(2));
  const slider = make("input", {
    type: "range",
    min: "0",
    max: "0.98",
    step: "0.02",
    value: view.smooth,
    oninput: () => {
      told.textContent = Number(slider.value).toFixed(2);
      change({smooth: Number(slider.value)}, showCharts);
    },
  });
  const boxes = section.measures.map((measure) =>
    checkbox(measure.label, view.measures.includes(measure.key), (on) => {
      const keys = section.measures
        .map((each) => each.key)
        .filter((key) => (key === measure.key ? on : view.measures.includes(key)));
      change({measures: keys}, showCharts);
    }),
  );
  return make(
    "div",
    {class: "controls"},
    chooser("Over", axes, view.axis, (axis) => change({axis, zoom: null}, showCharts)),
    chooser("Seeds", seeds, view.seeds, (value) => change({seeds: value}, showCharts)),
    make("label", {}, make("span", {}, "Smoothing"), slider, told),
    checkbox("log x", view.logX, (logX) => change({logX}, showCharts)),
    zoomButtons.element,
    make("details", {class: "menu"}, make("summary", {}, "Charts"), make("div", {class: "choices"}, boxes)),
  );
}

/** Buttons that do what dragging does. */
function zoomControls(sectionOf, view, change, showCharts) {
  const range = () => {
    const lines = view.measures.flatMap((key) => linesOf(sectionOf(), view, key, false));
    return (
      view.zoom || [
        Math.min(...lines.map((each) => each.x[0])),
        Math.max(...lines.map((each) => each.x[each.x.length - 1])),
      ]
    );
  };
  const zoom = () => {
    const [from, to] = range();
    if (!(from < to)) return;
    const quarter = (to - from) / 4;
    change(
      {zoom: view.logX ? [from * (to / from) ** 0.25, to / (to / from) ** 0.25] : [from + quarter, to - quarter]},
      showCharts,
    );
  };
  const closer = make("button", {type: "button", onclick: zoom}, "Zoom in");
  const reset = make(
    "button",
    {
      type: "button",
      disabled: !view.zoom,
      onclick: () => {
        change({zoom: null}, showCharts);
        closer.focus();
      },
    },
    "Show all",
  );
  return {element: make("span", {class: "zoom", role: "group", "aria-label": "Zoom"}, closer, reset), reset};
}

/** A check box with its line for each group; many groups can be searched. */
function legend(section, view, change, showCharts) {
  const entries = section.groups.map((group, place) => {
    const box = make("input", {
      type: "checkbox",
      checked: view.groups.includes(place),
      onchange: () =>
        choose(
          places()
            .filter((k) => k !== place)
            .concat(box.checked ? place : []),
        ),
    });
    return {
      box,
      place,
      element: make("label", {class: "key"}, box, swatch(place), make("span", {}, group.label)),
      label: group.label.toLowerCase(),
    };
  });
  const places = () => view.groups;
  const choose = (groups) => {
    change({groups: groups.slice().sort((a, b) => a - b)}, showCharts);
    for (const entry of entries) entry.box.checked = view.groups.includes(entry.place);
  };
  const all = entries.map((entry) => entry.place);
  const button = (text, groups) =>
    make("button", {type: "button", class: "small", onclick: () => choose(groups())}, text);
  const bar = make(
    "span",
    {class: "savers"},
    button("all", () => visible()),
    button("none", () => []),
    button("reset", () => section.shown),
  );
  const visible = () =>
    entries.some((entry) => !entry.element.hidden)
      ? entries.filter((entry) => !entry.element.hidden).map((entry) => entry.place)
      : all;
  const many = entries.length > MANY_GROUPS;
  const search = make("input", {
    type: "search",
    placeholder: "find a method",
    "aria-label": "Find a method",
    oninput: () => {
      for (const entry of entries) entry.element.hidden = !entry.label.includes(search.value.toLowerCase());
    },
  });
  const keys = make(
    "div",
    many
      ? {class: "keys many", tabindex: "0", role: "group", "aria-label": "Methods"}
      : {class: "keys", role: "group", "aria-label": "Methods"},
    entries.map((entry) => entry.element),
  );
  return make(
    "div",
    {class: "legend"},
    many ? make("div", {class: "bar"}, search, bar) : null,
    keys,
    many ? null : bar,
  );
}

function curveNotes(section) {
  const notes = [
    "Bands span the lowest to the highest seed; a mean ends where its shortest seed ends. Drag across a chart to zoom in, double-click to zoom out. Keyboard: the arrow keys read values, + and − zoom, 0 shows everything.",
  ];
  if (section.points)
    notes.push(
      `Curves are thinned to about ${section.points} points: of each stretch of rounds the lowest and the highest mean are kept. Tables use every round.`,
    );
  if (section.groups.reduce((lines, group) => lines + group.runs.length, 0) > MOST_LINES)
    notes.push(`At most ${MOST_LINES} lines are drawn in a chart.`);
  if (section.undrawn.length) notes.push(`Not drawn, to keep the page small: ${section.undrawn.join(", ")}.`);
  return notes.join(" ");
}

/** A table that is sorted by itself and keeps that to itself: {element, update}. */
function plainTable(table) {
  const element = make("div", {class: "card"});
  let sort = null;
  const show = () => {
    element.replaceChildren(
      make("div", {class: "bar"}, make("h3", {}, table.title), tableSavers(table)),
      drawTable(table, sort, (by) => {
        sort = by;
        show();
        element.querySelectorAll("button.sort")[by[0]].focus();
      }),
      make("p", {class: "faint"}, table.legend),
    );
  };
  show();
  const update = (next) => {
    table = next;
    show();
  };
  return {element, update};
}

/** Settings and commands, folded. */
function settingsPart(section) {
  const names = [...new Set(section.groups.flatMap((group) => Object.keys(group.settings)))].filter(
    (name) => name !== "algorithm",
  );
  const table = {
    title: "Settings that differ",
    legend: "",
    columns: ["method", ...names].map((name) => ({name, better: ""})),
    rows: section.groups.map((group) => [[group.label], ...names.map((name) => [group.settings[name] ?? ""])]),
  };
  const hidden = section.settings.defaults;
  return make(
    "details",
    {class: "fold"},
    make("summary", {}, "Settings and commands"),
    make(
      "p",
      {class: "faint"},
      `Shared by all runs${hidden ? `; ${hidden} settings at their defaults are not shown (run.toml has all of them)` : ""}.`,
    ),
    pairs(section.settings.shared),
    names.length ? make("h3", {}, "What differs") : null,
    names.length ? drawStatic(table) : null,
    make("h3", {}, "Commands"),
    section.groups.map((group) =>
      make(
        "details",
        {},
        make("summary", {}, group.label),
        group.commands.map((text) => make("pre", {tabindex: "0"}, text)),
      ),
    ),
  );
}

const drawStatic = (table) => {
  const host = make("div", {});
  const show = (sort) => host.replaceChildren(drawTable(table, sort, show));
  show(null);
  return host;
};

function pairs(entries) {
  return make(
    "dl",
    {},
    Object.entries(entries).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value || "–"))),
  );
}

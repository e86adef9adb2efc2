"use strict";
// Line charts, drawn by uPlot: values under the pointer or the arrow keys, zoom, and pictures to save.

const HEIGHT = 300;
const FONT = "12px system-ui, sans-serif";
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].flatMap((power) => [1, 2, 5].map((step) => step * 10 ** power)); // between ticks
// The loss of a run that diverged may reach 1e300; uPlot's own steps end at 5e31, and its powers of ten are not exact from 1e22 on.
const POWERS = Array.from({length: 601}, (_, place) => Number(`1e${place - 300}`));
const splitsOfLog = (u, axis, from, to) =>
  POWERS.flatMap((power) => [1, 2, 3, 4, 5, 6, 7, 8, 9].map((digit) => digit * power)).filter(
    (value) => from <= value * (1 + 1e-9) && value * (1 - 1e-9) <= to,
  );

/** The parts that all charts share: axes in the colours of the theme, no legend of uPlot's own. */
function frame(host, x, y, more) {
  const axis = (scale, side, {label, values, log}) => ({
    scale,
    label,
    side,
    stroke: colour("ink"),
    font: FONT,
    labelFont: FONT,
    labelGap: 2,
    labelSize: 22,
    grid: {stroke: colour("line"), width: 1, ...(log ? {filter: powers} : {})},
    ticks: {stroke: colour("line"), width: 1, size: 5, ...(log ? {filter: powers} : {})},
    values,
    ...(log ? {filter: powers, incrs: POWERS, splits: splitsOfLog} : {}),
  });
  return {
    width: Math.max(host.clientWidth, 200),
    height: HEIGHT,
    pxAlign: false,
    padding: [10, 28, 0, 0],
    legend: {show: false},
    scales: {x: {time: false, ...x.scale}, y: y.scale || {}},
    axes: [
      {...axis("x", 2, x), size: 32, space: 56, ...(x.whole ? {incrs: WHOLE} : {})},
      {...axis("y", 3, y), size: widestOf, space: 34},
    ],
    ...more,
  };
}

/** Room for the widest number of an axis. */
function widestOf(u, values) {
  const longest = (values || []).reduce((most, text) => Math.max(most, String(text ?? "").length), 0);
  return 18 + 7 * longest;
}

/** A range that a single point is in the middle of. */
const widened = (from, to) => (from < to ? [from, to] : from > 0 ? [from / 2, from * 2] : [from - 1, from + 1]);

const ticks = (unit) => (u, splits) => splits.map((value) => (value == null ? null : shown(value, unit)));
const MOST_POWERS = 8;
/** Of a logarithmic axis only the powers of ten, of many every nth; without enough, every value of few or every other of many. */
function powers(u, splits) {
  const all = splits.filter(
    (value) => value != null && Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9,
  );
  const step = Math.ceil(all.length / MOST_POWERS);
  const whole = all.filter((value) => Math.round(Math.log10(value)) % step === 0);
  return splits.map((value, k) =>
    (whole.length > 1 ? whole.includes(value) : splits.length < 9 || k % 2 === 0) ? value : null,
  );
}

/** Whether the range of a line's seeds is wider than the line anywhere. */
const isSpread = (each, plot) => plot.band !== false && each.high.some((high, at) => high > each.low[at]);
/** What of the lines a chart cannot change once it is drawn. */
const outline = (lines, plot) =>
  JSON.stringify(lines.map((each) => [each.label, each.place, isSpread(each, plot), each.x.length < 3]));
const columnsOf = (lines) =>
  lines.length ? uPlot.join(lines.map((each) => [each.x, each.y, each.low, each.high])) : [[]];

/**
 * Draw lines in `host`. `plot` has: title, x and y ({label, unit, log}), zoom ([from, to] or null), onzoom, sync.
 * Returns {savers, destroy, update}; update(lines) puts others in their place, and is false where they need a new chart.
 */
function drawChart(host, lines, plot) {
  const note = make("div", {class: "tip", hidden: true, "aria-live": "polite"});
  const table = columnsOf(lines);
  const series = [{}];
  const bands = [];
  lines.forEach((each, k) => {
    const spread = isSpread(each, plot);
    const paint = lineColour(each.place);
    const edge = {scale: "y", show: spread, stroke: "transparent", width: 0, points: {show: false}, spanGaps: true};
    const dots = {show: each.x.length < 3, size: 7, fill: paint};
    series.push(
      {scale: "y", stroke: paint, width: 2, dash: lineDash(each.place), points: dots, spanGaps: true},
      edge,
      edge,
    );
    if (spread) bands.push({series: [3 * k + 3, 3 * k + 2], fill: faded(paint)});
  });
  let active = false;
  const options = frame(
    host,
    {
      label: plot.x.label,
      whole: plot.x.whole,
      log: plot.x.log,
      scale: {distr: plot.x.log ? 3 : 1, range: (u, from, to) => plot.zoom || widened(from, to)},
      values: ticks(plot.x.unit),
    },
    {
      label: plot.y.label,
      log: plot.y.log,
      scale: {distr: plot.y.log ? 3 : 1},
      values: ticks(plot.y.unit),
    },
    {
      series,
      bands,
      cursor: {
        y: false,
        points: {show: false},
        drag: {x: true, y: false, setScale: false},
        sync: plot.sync ? {key: plot.sync, setSeries: false} : undefined,
        bind: {dblclick: () => () => plot.onzoom && plot.onzoom(null)},
      },
      hooks: {
        setSelect: [
          (u) => {
            if (u.select.width < 4 || !plot.onzoom) return;
            const [from, to] = [u.select.left, u.select.left + u.select.width].map((left) => u.posToVal(left, "x"));
            u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
            plot.onzoom([from, to]);
          },
        ],
        setCursor: [
          (u) => {
            const outside = !active || u.cursor.left == null || u.cursor.left < 0 || !lines.length;
            note.hidden = outside;
            if (!outside) tell(note, u, lines, plot);
          },
        ],
      },
    },
  );
  const u = new uPlot(options, table, host);
  host.append(note);
  const [enter, leave] = [
    () => {
      active = true;
    },
    () => {
      active = false;
      note.hidden = true;
    },
  ];
  const listeners = {
    mouseenter: enter,
    focus: enter,
    mouseleave: leave,
    blur: leave,
    keydown: (event) => press(event, u, plot),
  };
  for (const [name, listener] of Object.entries(listeners)) host.addEventListener(name, listener);
  const size = new ResizeObserver(() => host.clientWidth && u.setSize({width: host.clientWidth, height: HEIGHT}));
  size.observe(host);
  return {
    savers: savers(plot.title, {
      PNG: () => savePng(u, plot.title, keysOf(lines)),
      SVG: () => download(plot.title, "svg", svgOf(u, plot.title, keysOf(lines), linePaths(u, lines))),
      CSV: () => download(plot.title, "csv", linesAsCsv(lines, plot)),
    }),
    update(next) {
      if (outline(next, plot) !== outline(lines, plot)) return false;
      lines = next;
      u.setData(columnsOf(lines));
      if (!note.hidden && lines.length) tell(note, u, lines, plot);
      return true;
    },
    destroy() {
      size.disconnect();
      for (const [name, listener] of Object.entries(listeners)) host.removeEventListener(name, listener);
      u.destroy();
      note.remove();
    },
  };
}

/** Entries of a legend: one for each group, though it may have a line for each seed. */
const keysOf = (lines) => [...new Map(lines.map((each) => [each.key, {label: each.key, place: each.place}])).values()];
const faded = (paint) => `${paint}2e`; // a colour of the style sheet is #rrggbb

/** Write the values nearest to the cursor into the note, the highest first. */
function tell(note, u, lines, plot) {
  const x = u.posToVal(u.cursor.left, "x");
  const found = lines
    .filter((each) => each.x[0] <= x + 0.5 * (each.x[1] - each.x[0] || 1) && x <= lastStep(each))
    .map((each) => ({each, k: nearest(each.x, x)}))
    .sort((a, b) => b.each.y[b.k] - a.each.y[a.k]);
  const place = found.length ? found[0].each.x[found[0].k] : x;
  const rows = found.slice(0, 12).map(({each, k}) => {
    const range =
      plot.band !== false && each.high[k] > each.low[k]
        ? `${shown(each.low[k], plot.y.unit)} to ${shown(each.high[k], plot.y.unit)}`
        : "";
    return make(
      "li",
      {},
      swatch(each.place),
      make("span", {class: "who"}, each.label),
      make("b", {}, shown(each.y[k], plot.y.unit)),
      make("span", {class: "range"}, range),
    );
  });
  const rest =
    found.length > rows.length
      ? make("li", {}, make("span", {class: "rest"}, `and ${found.length - rows.length} others`))
      : null;
  const head = `${plot.x.short || plot.x.label} ${shown(place, plot.x.unit)}${plot.smoothed ? ", smoothed" : ""}`;
  note.replaceChildren(make("div", {class: "where"}, head), make("ul", {}, rows, rest));
  moveNote(note, u);
}

/** A little beyond the end of a line: there its last value is still told. */
function lastStep({x}) {
  const n = x.length;
  return x[n - 1] + 0.5 * (x[n - 1] - x[n - 2] || 1);
}

/** Keep the note inside the chart, beside the cursor. */
function moveNote(note, u) {
  const room = u.root.clientWidth;
  const left = u.over.offsetLeft + u.cursor.left;
  const width = Math.min(note.offsetWidth, room);
  note.style.left = `${Math.max(0, left + 14 + width <= room ? left + 14 : Math.min(left - 14 - width, room - width))}px`;
}

/** Arrows move the cursor, + and - zoom, 0 shows all. */
function press(event, u, plot) {
  const width = u.over.clientWidth;
  const left = u.cursor.left >= 0 ? u.cursor.left : width / 2;
  const to = {ArrowLeft: left - width / 60, ArrowRight: left + width / 60, Home: 0, End: width - 1}[event.key];
  if (to !== undefined) {
    u.setCursor({left: Math.max(0, Math.min(width - 1, to)), top: u.over.clientHeight / 2});
  } else if ((event.key === "+" || event.key === "-" || event.key === "0") && plot.onzoom) {
    plot.onzoom(event.key === "0" ? null : zoomed(u, event.key === "+" ? 0.5 : 2, left));
  } else return;
  event.preventDefault();
}

/** The range after zooming by a factor around a place of the chart; null for all. */
function zoomed(u, factor, left = u.over.clientWidth / 2) {
  const width = u.over.clientWidth;
  const from = left - left * factor;
  const to = left + (width - left) * factor;
  const ends = [u.data[0][0], u.data[0][u.data[0].length - 1]];
  const range = [u.posToVal(from, "x"), u.posToVal(to, "x")];
  return range[0] <= ends[0] && range[1] >= ends[1] ? null : [Math.max(range[0], ends[0]), Math.min(range[1], ends[1])];
}

/** Points by site: one series of dots for each. */
function drawDots(host, points, names, title) {
  const place = points.map((point, k) => k).sort((a, b) => points[a][0] - points[b][0]);
  const xs = place.map((k) => points[k][0]);
  const columns = names.map((name, site) => place.map((k) => (points[k][2] === site ? points[k][1] : null)));
  const series = names.map((name, site) => ({
    stroke: lineColour(site),
    paths: () => null,
    points: {show: true, size: 5, fill: lineColour(site), width: 0},
  }));
  const none = () => [];
  const options = frame(
    host,
    {label: "", values: none},
    {label: "", values: none},
    {
      series: [{}, ...series],
      cursor: {show: false},
    },
  );
  const u = new uPlot(options, [xs, ...columns], host);
  const keys = names.map((label, k) => ({label, place: k}));
  return {savers: savers(title, {PNG: () => savePng(u, title, keys)}), destroy: () => u.destroy()};
}

// Pictures to save. They have the title and the legend, which on the page are elements.

/** A canvas with the title above the chart and the legend below. */
function savePng(u, title, keys) {
  const scale = window.devicePixelRatio || 1;
  const canvas = u.ctx.canvas;
  const width = canvas.width / scale;
  const height = canvas.height / scale;
  const rows = legendRows(keys, width);
  const whole = make("canvas", {width: canvas.width, height: (height + 28 + 20 * rows.length) * scale});
  const ink = whole.getContext("2d");
  ink.fillStyle = colour("card");
  ink.fillRect(0, 0, whole.width, whole.height);
  ink.drawImage(canvas, 0, 28 * scale);
  ink.scale(scale, scale);
  ink.fillStyle = colour("ink");
  ink.font = `600 14px system-ui, sans-serif`;
  ink.fillText(title, 10, 19);
  ink.font = FONT;
  rows.forEach((row, k) =>
    row.forEach(({label, place, x}) => {
      const y = height + 28 + 20 * k + 10;
      ink.strokeStyle = lineColour(place);
      ink.setLineDash(lineDash(place));
      ink.lineWidth = 2.5;
      ink.beginPath();
      ink.moveTo(x, y);
      ink.lineTo(x + 22, y);
      ink.stroke();
      ink.fillText(label, x + 28, y + 4);
    }),
  );
  whole.toBlob((blob) => download(title, "png", blob));
}

/** Legend entries in rows that fit, with their places; a letter is taken to be seven pixels wide. */
function legendRows(keys, width) {
  const rows = [];
  let x = Infinity;
  for (const key of keys) {
    const wide = 48 + 7 * key.label.length;
    if (x + wide > width) {
      rows.push([]);
      x = 10;
    }
    rows[rows.length - 1].push({...key, x});
    x += wide;
  }
  return rows;
}

const markup = (text) => String(text).replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);
const px = (number) => Number(number.toFixed(2));

/** The chart as SVG: the axes as uPlot has laid them out, and `shapes` inside the plot. */
function svgOf(u, title, keys, shapes) {
  const [left, top] = [u.over.offsetLeft, u.over.offsetTop + 28];
  const [width, height] = [u.over.clientWidth, u.over.clientHeight];
  const rows = legendRows(keys, u.width);
  const ink = colour("ink");
  const label = (x, y, anchor, text, more = "") =>
    `<text x="${px(x)}" y="${px(y)}" text-anchor="${anchor}" fill="${ink}"${more}>${markup(text)}</text>`;
  const parts = [label(10, 19, "start", title, ' font-weight="600" font-size="14"')];
  const [across, up] = u.axes;
  (across._splits || []).forEach((value, k) => {
    const x = left + u.valToPos(value, "x");
    if (x < left - 1 || x > left + width + 1) return;
    parts.push(`<path d="M${px(x)} ${top}V${top + height}" stroke="${colour("line")}"/>`);
    if (across._values[k]) parts.push(label(x, top + height + 18, "middle", across._values[k]));
  });
  (up._splits || []).forEach((value, k) => {
    const y = top + u.valToPos(value, "y");
    if (y < top - 1 || y > top + height + 1) return;
    parts.push(`<path d="M${left} ${px(y)}H${left + width}" stroke="${colour("line")}"/>`);
    if (up._values[k]) parts.push(label(left - 8, y + 4, "end", up._values[k]));
  });
  parts.push(label(left + width / 2, top + height + 40, "middle", across.label || ""));
  parts.push(label(0, 0, "middle", up.label || "", ` transform="translate(14 ${top + height / 2}) rotate(-90)"`));
  rows.forEach((row, k) =>
    row.forEach(({label: text, place, x}) => {
      const y = u.height + 28 + 20 * k + 10;
      parts.push(
        `<path d="M${x} ${y}h22" stroke="${lineColour(place)}" stroke-width="2.5" stroke-dasharray="${lineDash(place)}"/>`,
      );
      parts.push(label(x + 28, y + 4, "start", text));
    }),
  );
  const all = [u.width, u.height + 28 + 20 * rows.length];
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${all.join(" ")}" width="${all[0]}" height="${all[1]}" font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="${colour("card")}"/>
<clipPath id="plot"><rect x="${left}" y="${top}" width="${width}" height="${height}"/></clipPath>
${parts.join("\n")}
<g clip-path="url(#plot)"><g transform="translate(${left} ${top})">
${shapes.join("\n")}
</g></g></svg>
`;
}

/** The lines and their bands as paths. */
function linePaths(u, lines) {
  const at = (each, column, k) => `${px(u.valToPos(each.x[k], "x"))} ${px(u.valToPos(each[column][k], "y"))}`;
  return lines.flatMap((each) => {
    const there = each.x.map((x, k) => k);
    const paint = lineColour(each.place);
    const path = (column, places) => places.map((k) => at(each, column, k)).join("L");
    const shapes = [
      `<path d="M${path("y", there)}" fill="none" stroke="${paint}" stroke-width="2" stroke-dasharray="${lineDash(each.place)}"/>`,
    ];
    if (each.high.some((high, k) => high > each.low[k])) {
      shapes.unshift(
        `<path d="M${path("high", there)}L${path("low", there.slice().reverse())}Z" fill="${paint}" fill-opacity=".18"/>`,
      );
    }
    return shapes;
  });
}

/** What is drawn, a row for each point. */
function linesAsCsv(lines, plot) {
  const rows = lines.flatMap((each) => each.x.map((x, k) => [each.label, x, each.y[k], each.low[k], each.high[k]]));
  return asCsv([["line", plot.x.label, plot.y.label, "lowest seed", "highest seed"], ...rows]);
}

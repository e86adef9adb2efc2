"use strict";
// Pictures of a table of numbers: a cell is the darker the larger its number.

/**
 * Draw `grid` in `host`: rows of values (null is blank), names of rows and columns, the axes' labels, `most` (the value of the
 * full colour), `paint` (a colour of the style sheet) and say(value) for the text of a cell.
 */
function drawGrid(host, grid) {
  const [height, width] = [grid.values.length, grid.values[0].length];
  const note = make("div", {class: "tip", hidden: true, "aria-live": "polite"});
  const shade = shadesOf(colour("card"), colour(grid.paint));
  const name = (names) => (u, splits) => splits.map((k) => (Number.isInteger(k) && names[k] != null ? names[k] : null));
  let active = false;
  const cellAt = (u) =>
    [Math.round(u.posToVal(u.cursor.left, "x")), Math.round(u.posToVal(u.cursor.top, "y"))].map((k, side) =>
      Math.max(0, Math.min((side ? height : width) - 1, k)),
    );
  const corner = (u, column, row, device) => [
    u.valToPos(column - 0.5, "x", device),
    u.valToPos(row + 0.5, "y", device),
    u.valToPos(column + 0.5, "x", device) - u.valToPos(column - 0.5, "x", device),
    u.valToPos(row - 0.5, "y", device) - u.valToPos(row + 0.5, "y", device),
  ];
  const options = frame(
    host,
    {label: grid.columnLabel, scale: {range: () => [-0.5, width - 0.5]}, values: name(grid.columns)},
    {label: grid.rowLabel, scale: {range: () => [-0.5, height - 0.5]}, values: name(grid.rows)},
    {
      series: [{}, {paths: () => null, points: {show: false}}],
      cursor: {x: false, y: false, points: {show: false}, drag: {x: false, y: false}},
      hooks: {
        drawAxes: [
          (u) => {
            u.ctx.save();
            grid.values.forEach((row, r) =>
              row.forEach((value, c) => {
                if (!value) return;
                u.ctx.fillStyle = shade(value / grid.most);
                const [x, y, w, h] = corner(u, c, r, true);
                u.ctx.fillRect(x, y, Math.max(w - (w > 6 ? 1 : 0), 1), Math.max(h - (h > 6 ? 1 : 0), 1));
              }),
            );
            u.ctx.restore();
          },
        ],
        setCursor: [
          (u) => {
            note.hidden = !active || u.cursor.left == null || u.cursor.left < 0;
            if (note.hidden) return;
            const [column, row] = cellAt(u);
            const where = `${grid.columnName} ${grid.columns[column]}, ${grid.rowName} ${grid.rows[row]}`;
            note.replaceChildren(
              make("div", {class: "where"}, where),
              make("b", {}, grid.say(grid.values[row][column])),
            );
            moveNote(note, u);
          },
        ],
      },
    },
  );
  options.axes.forEach((axis) => {
    axis.grid.show = false;
    axis.incrs = WHOLE;
  });
  const u = new uPlot(options, [grid.columns.map((_, k) => k), grid.columns.map(() => 0)], host);
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
  const press = (event) => {
    const step = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1]}[event.key];
    if (!step) return;
    event.preventDefault();
    const [column, row] = u.cursor.left >= 0 ? cellAt(u) : [0, 0];
    const to = [Math.max(0, Math.min(width - 1, column + step[0])), Math.max(0, Math.min(height - 1, row + step[1]))];
    u.setCursor({left: u.valToPos(to[0], "x"), top: u.valToPos(to[1], "y")});
  };
  const listeners = {mouseenter: enter, focus: enter, mouseleave: leave, blur: leave, keydown: press};
  for (const [event, listener] of Object.entries(listeners)) host.addEventListener(event, listener);
  const size = new ResizeObserver(() => host.clientWidth && u.setSize({width: host.clientWidth, height: HEIGHT}));
  size.observe(host);
  const shapes = () =>
    grid.values
      .flatMap((row, r) => row.map((value, c) => [value, corner(u, c, r, false)]))
      .filter(([value]) => value)
      .map(
        ([value, [x, y, w, h]]) =>
          `<rect x="${px(x)}" y="${px(y)}" width="${px(w)}" height="${px(h)}" fill="${shade(value / grid.most)}"/>`,
      );
  return {
    savers: savers(grid.title, {
      PNG: () => savePng(u, grid.title, []),
      SVG: () => download(grid.title, "svg", svgOf(u, grid.title, [], shapes())),
      CSV: () =>
        download(
          grid.title,
          "csv",
          asCsv([["", ...grid.columns], ...grid.values.map((row, r) => [grid.rows[r], ...row])]),
        ),
    }),
    destroy() {
      size.disconnect();
      for (const [event, listener] of Object.entries(listeners)) host.removeEventListener(event, listener);
      u.destroy();
      note.remove();
    },
  };
}

/** From the ground to the full colour, both #rrggbb; the square root lets small numbers be seen. */
function shadesOf(ground, full) {
  const parts = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const [from, to] = [parts(ground), parts(full)];
  return (share) => {
    const much = Math.sqrt(Math.max(0, Math.min(1, share)));
    return `rgb(${from.map((value, k) => Math.round(value + (to[k] - value) * much)).join(",")})`;
  };
}

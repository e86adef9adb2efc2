"use strict";
// From the document's curves to the lines of a chart: which rounds, over what, smoothed how, of which seeds.

const MOST_LINES = 60; // in one chart

/** Where corners [xs, ys] lead at x: between two of them a straight line. */
function along([xs, ys], x) {
  let low = 0;
  let high = xs.length - 1;
  if (high < 0) return null;
  if (x <= xs[0]) return ys[0];
  if (x >= xs[high]) return ys[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low]);
}

/** The running mean in which the past weighs `share`, from 0 to below 1; the first values are not pulled to zero. */
function smooth(values, share) {
  if (!share) return values;
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    sum = share * sum + (1 - share) * value;
    weight = share * weight + (1 - share);
    return sum / weight;
  });
}

/** A line {label, key (its group), place, x, y, low, high}; x rises strictly, and what a logarithmic axis cannot show is left out. */
function line(label, key, place, points, view, log) {
  const columns = [0, 1, 2].map((k) =>
    smooth(
      points.map((point) => point[1][k]),
      view.smooth,
    ),
  );
  const found = {label, key, place, x: [], y: [], low: [], high: []};
  points.forEach(([x], k) => {
    const [y, low, high] = columns.map((column) => column[k]);
    if ((view.logX && x <= 0) || (log && y <= 0)) return;
    if (found.x.length && x <= found.x[found.x.length - 1]) {
      for (const column of [found.x, found.y, found.low, found.high]) column.pop();
      if (found.x.length && x <= found.x[found.x.length - 1]) return;
    }
    found.x.push(x);
    found.y.push(y);
    found.low.push(log && low <= 0 ? y : low);
    found.high.push(high);
  });
  return found;
}

/** The lines of a measure: the mean of each visible group with the range of its seeds, or every seed. */
function linesOf(section, view, key, log) {
  const lines = [];
  for (const place of view.groups) {
    const group = section.groups[place];
    const curve = group.curves[key];
    if (!curve) continue;
    const rounds = section.rounds[curve.at];
    const at = (run, round) => (view.axis === "round" ? round : along(group.runs[run].spent[view.axis], round));
    if (view.seeds === "single") {
      curve.runs.forEach((values, run) => {
        const points = rounds.map((round, k) => [at(run, round), [values[k], values[k], values[k]]]);
        const known = points.filter((point) => point[1][0] != null);
        if (known.length)
          lines.push(line(`${group.label}, seed ${group.runs[run].seed}`, group.label, place, known, view, log));
      });
    } else {
      const runs = curve.runs.map((values, run) => run).filter((run) => curve.runs[run].some((value) => value != null));
      const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
      const points = [];
      rounds.forEach((round, k) => {
        const values = runs.map((run) => curve.runs[run][k]);
        if (values.some((value) => value == null)) return; // every mean is over the same seeds
        points.push([
          mean(runs.map((run) => at(run, round))),
          [mean(values), Math.min(...values), Math.max(...values)],
        ]);
      });
      if (points.length) lines.push(line(group.label, group.label, place, points, view, log));
    }
  }
  return lines.filter((each) => each.x.length).slice(0, MOST_LINES);
}

/** The place of the value of a rising list that is nearest to x. */
function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
}

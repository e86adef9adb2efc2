"use strict";
// What a reader chose to see of a section, and how the page's address keeps it.

const FIRST_CHARTS = 4;

/** What a section shows before anybody has touched it. Methods that grow keep their order, so that they keep their colours. */
function firstView(section) {
  const score = section.table.columns.findIndex((column) => column.better);
  return {
    axis: "round",
    seeds: section.growing ? "single" : "band",
    smooth: 0,
    logX: false,
    zoom: null,
    sort: section.growing ? [score, section.table.columns[score].better === "higher"] : null,
    against: 0,
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
  axis: ["x", String, String],
  seeds: ["seeds", String, String],
  smooth: ["smooth", String, Number],
  logX: ["lx", Number, (text) => text === "1"],
  against: ["vs", String, Number],
  groups: ["on", ...numbers],
  measures: ["y", ...list],
  logY: ["ly", ...list],
  zoom: [
    "z",
    (range) => (range ? range.map((end) => Number(end.toPrecision(6))).join(":") : ""),
    (text) => {
      const ends = text.split(":").map(Number);
      return ends.length === 2 && ends[0] < ends[1] ? ends : null;
    },
  ],
  sort: [
    "sort",
    (by) => (by ? `${by[0]}${by[1] ? "d" : "u"}` : ""),
    (text) => {
      const by = /^(\d+)([du])$/.exec(text);
      return by ? [Number(by[1]), by[2] === "d"] : null;
    },
  ],
  classes: [
    "class",
    (by) => by.join(":"),
    (text) => {
      const [k, what] = text.split(":");
      return [Number(k), what];
    },
  ],
};

/** A view as entries of the address: only what is not as at first. */
function viewEntries(section, view) {
  const first = firstView(section);
  return Object.entries(ADDRESS)
    .map(([part, [name, write]]) => [name, String(write(view[part])), String(write(first[part]))])
    .filter(([, now, before]) => now !== before)
    .map(([name, now]) => [name, now]);
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

/** The view of a section that has grown into another one: the same methods and measures, and what nobody has chosen as at first. */
function carriedView(before, view, after) {
  const [old, first] = [firstView(before), firstView(after)];
  const chosen = (part) => String(ADDRESS[part][1](view[part])) !== String(ADDRESS[part][1](old[part]));
  const nameOf = (group) => group?.commands[0]; // its first folder: labels change when more runs differ in more settings
  const placeOf = (place) => after.groups.findIndex((group) => nameOf(group) === nameOf(before.groups[place]));
  const found = (place) => place >= 0;
  for (const part of Object.keys(ADDRESS)) if (chosen(part)) first[part] = view[part];
  if (chosen("groups")) {
    const known = new Set(before.groups.map(nameOf));
    const fresh = after.shown.filter((place) => !known.has(nameOf(after.groups[place])));
    first.groups = [...view.groups.map(placeOf).filter(found), ...fresh].sort((a, b) => a - b);
  }
  if (chosen("against")) first.against = Math.max(0, after.tests.groups.indexOf(placeOf(before.tests.groups[view.against])));
  if (chosen("classes")) {
    const k = after.classes.findIndex((each) => each.group === placeOf(before.classes[view.classes[0]]?.group));
    first.classes = [Math.max(0, k), view.classes[1]];
  }
  const same = JSON.stringify(before.table.columns) === JSON.stringify(after.table.columns);
  if (chosen("sort") && !same) first.sort = null;
  return first;
}

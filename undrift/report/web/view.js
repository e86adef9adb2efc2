"use strict";
// What a reader chose to see of a section, and how the page's address keeps it.

const FIRST_CHARTS = 4;

/** What a section shows before anybody has touched it. */
function firstView(section) {
  return {
    axis: "round",
    seeds: "band",
    smooth: 0,
    logX: false,
    zoom: null,
    sort: null,
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

// Several runs: their metrics with error bars, paired differences, and which rows change.
const valueOf = (point, key) => point.values.find(([k]) => k === key)?.[1];
const keysOf = (points) => [...new Set(points.flatMap((p) => p.values.map(([key]) => key)))];
const metricsOf = (points) => [...new Set(points.flatMap((p) => p.metrics.map((m) => m.name)))];
const metricOf = (point, name) => point.metrics.find((m) => m.name === name);

// Points by what sets them apart among these, in few words; by their whole names where that does not tell them apart.
function labelsOf(points) {
  const value = (p, key) => valueOf(p, key) ?? "–",
    keys = keysOf(points),
    apart = keys.filter((key) => new Set(points.map((p) => value(p, key))).size > 1),
    labels = points.map((p) => apart.map((key) => `${wordOf(key, keys)}=${value(p, key)}`).join("  ")),
    alike = points.some((p) => p.problem) || new Set(labels).size < points.length || !apart.length;
  return alike ? points.map((p) => p.name) : labels;
}
const wordOf = (key, keys) => {
  const last = (k) => (k === "task.name" ? "task" : k.split(".").at(-1));
  return keys.some((other) => other !== key && last(other) === last(key)) ? key : last(key);
};
function sweepTable(points) {
  const labels = labelsOf(points),
    names = metricsOf(points),
    folders = points.some((p) => p.folder),
    numbers = (texts) => texts.map((text) => ({ text, num: true }));
  const heads = ["point", ...numbers([...names, "rows", "failed"]), folders ? "folder" : { text: "seeds", num: true }];
  const figure = (m) =>
    m ? [short(m.value), m.stderr === null ? "" : span("muted", ` ± ${short(m.stderr)}`)] : "–";
  const state = (p) =>
    p.problem ? div("note bad small", p.problem) : !p.finished && div("muted small", "not at its end");
  const rows = points.map((p, i) => [
    [labels[i], state(p)],
    ...names.map((name) => figure(metricOf(p, name))),
    whole(p.rows),
    whole(p.counts.failed),
    folders ? el("code", {}, p.folder) : p.name.split("  ").at(-1).split(" ")[0],
  ]);
  return wideTable(heads, rows);
}
function metricPlots(points, of) {
  const tasks = [...new Set(points.map((p) => p.task))],
    labels = labelsOf(points),
    inkOf = (p) => tasks.length > 1 && ofRequest(tasks.indexOf(p.task));
  const row = (p, m, label) => {
    const title = `${short(m.value)}, standard error ${short(m.stderr)}, ${many(m.n, of)}`;
    return { ...m, label, ink: inkOf(p), figure: plusMinus(m), title };
  };
  return metricsOf(points).map((name) => {
    const rows = points.flatMap((p, i) => (metricOf(p, name) ? [row(p, metricOf(p, name), labels[i])] : [])),
      describe = `${name} of every point, with 95 % intervals`;
    return card(name, fluid((width) => intervals(rows, { width, describe })));
  });
}
// A metric over each number that the points differ in, a line for each choice of the other keys.
function linePlots(points) {
  const good = points.filter((p) => !p.problem),
    keys = keysOf(good).filter((key) => key !== "seed");
  const isSwept = (key) =>
    good.every((p) => typeof valueOf(p, key) === "number") && new Set(good.map((p) => valueOf(p, key))).size > 1;
  const plotOf = (key, metric) => {
    const found = new Map(),
      others = keys.filter((k) => k !== key);
    for (const p of good) {
      const m = metricOf(p, metric);
      if (!m || !isNumber(m.value)) continue;
      const label = others.map((k) => `${wordOf(k, keys)}=${valueOf(p, k)}`).join("  ");
      found.set(label, [...(found.get(label) || []), { x: valueOf(p, key), ...m, figure: plusMinus(m) }]);
    }
    const sorted = (at) => at.sort((a, b) => a.x - b.x),
      series = [...found].map(([label, at], i) => ({ label, ink: ofRequest(i), points: sorted(at) })),
      legend = span(null, series.map((s) => keyOf(s.ink, s.label))),
      describe = `${metric} over ${key}, with bands of 95 %`;
    return card(
      `${metric} over ${wordOf(key, keys)}`,
      series.some((s) => s.label) && div("lab", legend),
      fluid((width) => lines(series, { width, name: key, describe })),
    );
  };
  return keys.filter(isSwept).flatMap((key) => metricsOf(good).map((metric) => plotOf(key, metric)));
}
// Those of all points with the one at `base`, as [place of the other, name, difference].
function deltasWith(sweep, base) {
  const minus = (x) => (x === null ? null : -x);
  return sweep.deltas
    .filter(([a, b]) => a === base || b === base)
    .map(([a, b, name, value, stderr, low, high, n, up, down]) =>
      a === base
        ? [b, name, { value, stderr, low, high, n, up, down }]
        : [a, name, { value: -value, stderr, low: minus(high), high: minus(low), n, up: down, down: up }],
    );
}
function deltaView(sweep) {
  const able = sweep.points
    .map((p, i) => [i, p.name])
    .filter(([i]) => sweep.deltas.some(([a, b]) => a === i || (sweep.complete && b === i)));
  if (!able.length) return null;
  const box = div("stack");
  const draw = (base) => {
    const mine = deltasWith(sweep, base);
    const plots = [...new Set(mine.map(([, name]) => name))].map((name) => {
      const those = mine.filter((d) => d[1] === name).sort(([x], [y]) => x - y),
        [baseline, ...labels] = labelsOf([base, ...those.map(([other]) => other)].map((i) => sweep.points[i])),
        rows = those.map(([, , d], i) => deltaRow(labels[i], d)),
        options = { zero: 0, describe: `Paired differences of ${name}` },
        title = el("h3", { style: { margin: "6px 0" } }, `${name}, minus that of ${baseline}`);
      return div(null, title, fluid((width) => intervals(rows, { ...options, width })));
    });
    box.replaceChildren(...plots);
  };
  draw(able[0][0]);
  const few = " Each point is compared with the first of its input only: there are too many pairs.",
    words =
      "Differences of the same rows, so that hard rows drop out; bars are 95 %. A hollow dot's interval holds zero.";
  return card(
    el("h2", {}, "Paired differences"),
    div("tools", choice("Baseline", able, able[0][0], (v) => draw(Number(v)))),
    el("p", { cls: "muted small", style: { "margin-bottom": "8px" } }, words + (sweep.complete ? "" : few)),
    box,
  );
}
// The rows of one input, a line for each point.
function gridOf(sweep, grid) {
  const rows = grid.kinds[0].length,
    same = [...Array(rows).keys()].filter((i) => grid.kinds.every((k) => k[i] === grid.kinds[0][i])).length,
    labels = labelsOf(grid.points.map((i) => sweep.points[i])),
    line = 20;
  let wide = 0;
  const paint = (pen, width) => {
    const inks = KINDS.map((kind) => colour(`--${kind}`)),
      measured = (text) => pen.measureText(text).width;
    pen.font = "12px sans-serif";
    wide = Math.min(Math.max(...labels.map(measured)) + 12, width * 0.5);
    const cell = (width - wide) / rows;
    pen.textBaseline = "middle";
    grid.kinds.forEach((kinds, y) => {
      pen.globalAlpha = 1;
      pen.fillStyle = colour("--ink");
      let text = labels[y];
      while (text.length > 3 && measured(text) > wide - 11) text = `${text.slice(0, -2)}…`.replace("……", "…");
      pen.fillText(text, 0, y * line + line / 2);
      for (let i = 0; i < rows; i++) {
        pen.globalAlpha = kinds[i] === "2" ? 0.4 : 1;
        pen.fillStyle = inks[kinds[i]];
        pen.fillRect(wide + i * cell, y * line + 2, Math.max(0.6, cell - (cell > 4 ? 1 : 0)), line - 4);
      }
    });
  };
  const { node, canvas } = surface(grid.points.length * line + 2, paint);
  hover(canvas, (e) => {
    const i = Math.floor((e.offsetX - wide) / ((canvas.clientWidth - wide) / rows)),
      y = Math.floor(e.offsetY / line);
    return i >= 0 && i < rows && grid.kinds[y] && `row ${i + 1} · ${labels[y]}\n${KINDS[grid.kinds[y][i]]}`;
  });
  const all = grid.points.length === 2 ? "both" : `all ${grid.points.length}`,
    more = grid.rows > rows ? `; the first ${whole(rows)} of ${whole(grid.rows)} are drawn` : "",
    words = `${grid.task}: ${whole(same)} of ${many(rows, "row")} are the same in ${all} points${more}.`;
  return div(null, el("p", { cls: "muted small", style: { margin: "4px 0 8px" } }, words), node);
}
function gridView(sweep) {
  const legend = span(null, KINDS.map((k) => keyOf(`var(--${k})`, k))),
    grids = sweep.grid.map((grid) => gridOf(sweep, grid));
  return grids.length > 0 && card(el("h2", {}, "Which rows change"), div("lab", legend), div("stack", grids));
}
function sweepView(sweep) {
  const { points, folded: means } = sweep,
    plots = linePlots(means.length ? means : points),
    notes = [...sweep.missing, ...points.flatMap((p) => p.notes.map((n) => `${p.name}: ${n}`))],
    all = span(null, `All ${whole(points.length)} points`);
  // bars of means stand before the table of all points, bars of points behind it
  const above = plots.length || !means.length ? plots : metricPlots(means, "seed"),
    below = plots.length || means.length ? [] : metricPlots(points, "row");
  return div(
    "stack",
    noteList(notes),
    means.length > 0 && card("Means over seeds ± their standard errors", sweepTable(means)),
    above.length > 0 && div("stack", above),
    means.length ? card(null, folded(all, sweepTable(points))) : card("Points", sweepTable(points)),
    below.length > 0 && div("stack", below),
  );
}

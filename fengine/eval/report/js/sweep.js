// Several runs: their metrics with error bars, paired differences, and which rows change.
// Points by what sets them apart among these, in few words; by their whole names where that does not tell them apart.
function labelsOf(points) {
  const value = (p, key) => p.values.find(([k]) => k === key)?.[1] ?? "–",
    keys = [...new Set(points.flatMap((p) => p.values.map(([k]) => k)))],
    apart = keys.filter((key) => new Set(points.map((p) => value(p, key))).size > 1),
    labels = points.map((p) => apart.map((key) => `${wordOf(key, keys)}=${value(p, key)}`).join("  "));
  return points.some((p) => p.problem) || new Set(labels).size < points.length || !apart.length ? points.map((p) => p.name) : labels;
}
const wordOf = (key, keys) => {
  const last = (k) => (k === "task.name" ? "task" : k.split(".").at(-1));
  return keys.some((other) => other !== key && last(other) === last(key)) ? key : last(key);
};
function sweepTable(points) {
  const labels = labelsOf(points),
    folded = points.every((p) => !p.folder);
  const names = [...new Set(points.flatMap((p) => p.metrics.map((m) => m.name)))];
  const heads = [
    "point",
    ...names.map((n) => ({ text: n, num: true })),
    { text: "rows", num: true },
    { text: "failed", num: true },
    folded ? { text: "seeds", num: true } : "folder",
  ];
  return wideTable(
    heads,
    points.map((p, i) => [
      [
        labels[i],
        p.problem
          ? el("div", { cls: "note bad small" }, p.problem)
          : !p.finished && el("div", { cls: "muted small" }, "not at its end"),
      ],
      ...names.map((n) => {
        const m = p.metrics.find((x) => x.name === n);
        return m
          ? [short(m.value), m.stderr === null ? "" : el("span", { cls: "muted" }, ` ± ${short(m.stderr)}`)]
          : "–";
      }),
      whole(p.rows),
      whole(p.counts.failed),
      folded ? p.name.split("  ").at(-1).split(" ")[0] : el("code", {}, p.folder),
    ]),
  );
}
function metricPlots(points, of) {
  const names = [...new Set(points.flatMap((p) => p.metrics.map((m) => m.name)))],
    tasks = [...new Set(points.map((p) => p.task))],
    labels = labelsOf(points);
  return names.map((name) => {
    const rows = points
      .map((p, i) => [p, p.metrics.find((m) => m.name === name), labels[i]])
      .filter(([, m]) => m)
      .map(([p, m, label]) => ({
        label,
        value: m.value,
        low: m.low,
        high: m.high,
        ink: tasks.length > 1 && TRACE_COLOURS[tasks.indexOf(p.task) % TRACE_COLOURS.length],
        figure: `${short(m.value)}${m.stderr === null ? "" : ` ± ${short(m.stderr)}`}`,
        title: `${short(m.value)}, standard error ${short(m.stderr)}, ${many(m.n, of)}`,
      }));
    return card(
      name,
      fluid((w) => intervals(rows, { width: w, describe: `${name} of every point, with 95 % intervals` })),
    );
  });
}
// A metric over each number that the points differ in, a line for each choice of the other keys.
function linePlots(points) {
  const good = points.filter((p) => !p.problem),
    value = (p, key) => p.values.find(([k]) => k === key)?.[1],
    keys = [...new Set(good.flatMap((p) => p.values.map(([k]) => k)))].filter((k) => k !== "seed"),
    numeric = keys.filter(
      (k) => good.every((p) => typeof value(p, k) === "number") && new Set(good.map((p) => value(p, k))).size > 1,
    ),
    names = [...new Set(good.flatMap((p) => p.metrics.map((m) => m.name)))];
  return numeric.flatMap((key) =>
    names.map((name) => {
      const found = new Map();
      for (const p of good) {
        const m = p.metrics.find((x) => x.name === name);
        if (!m || !isNumber(m.value)) continue;
        const label = keys.filter((k) => k !== key).map((k) => `${wordOf(k, keys)}=${value(p, k)}`);
        const of = found.get(label.join("  ")) || found.set(label.join("  "), []).get(label.join("  "));
        of.push({ x: value(p, key), ...m, figure: `${short(m.value)}${m.stderr === null ? "" : ` ± ${short(m.stderr)}`}` });
      }
      const series = [...found].map(([label, at], i) => ({
        label,
        ink: TRACE_COLOURS[i % TRACE_COLOURS.length],
        points: at.sort((a, b) => a.x - b.x),
      }));
      return card(
        `${name} over ${wordOf(key, keys)}`,
        series.some((s) => s.label) && el("div", { cls: "lab" }, el("span", {}, series.map((s) => keyOf(s.ink, s.label)))),
        fluid((w) =>
          lines(series, { width: w, name: key, describe: `${name} over ${key}, with bands of 95 %` }),
        ),
      );
    }),
  );
}
function deltaView(sweep) {
  const able = sweep.points
    .map((p, i) => [i, p.name])
    .filter(([i]) => sweep.deltas.some(([a, b]) => a === i || (sweep.complete && b === i)));
  if (!able.length) return null;
  const box = el("div", { cls: "stack" });
  const draw = (base) => {
    const mine = sweep.deltas
      .filter(([a, b]) => a === base || b === base)
      .map(([a, b, name, value, se, low, high, n, up, down]) =>
        a === base
          ? { other: b, name, value, se, low, high, n, up, down }
          : {
              other: a,
              name,
              value: -value,
              se,
              low: high === null ? null : -high,
              high: low === null ? null : -low,
              n,
              up: down,
              down: up,
            },
      );
    const names = [...new Set(mine.map((d) => d.name))];
    box.replaceChildren(
      ...names.map((name) => {
        const those = mine.filter((d) => d.name === name).sort((x, y) => x.other - y.other);
        const [baseline, ...labels] = labelsOf([base, ...those.map((d) => d.other)].map((i) => sweep.points[i]));
        return el(
          "div",
          {},
          el("h3", { style: { margin: "6px 0" } }, `${name}, minus that of ${baseline}`),
          fluid((w) =>
            intervals(
              those.map((d, i) => ({
                label: labels[i],
                value: d.value,
                low: d.low,
                high: d.high,
                hollow: d.low <= 0 && d.high >= 0,
                figure: `${signed(d.value)} ± ${fixed(d.se)}`,
                title: `${signed(d.value)}, standard error ${fixed(d.se)}, ${many(d.n, "row")}${d.up === null ? "" : `, ${d.up} up, ${d.down} down`}`,
              })),
              { zero: 0, width: w, describe: `Paired differences of ${name}` },
            ),
          ),
        );
      }),
    );
  };
  draw(able[0][0]);
  return card(
    el("h2", {}, "Paired differences"),
    el(
      "div",
      { cls: "tools" },
      choice("Baseline", able, able[0][0], (v) => draw(Number(v))),
    ),
    el(
      "p",
      { cls: "muted small", style: { "margin-bottom": "8px" } },
      "Differences of the same rows, so that hard rows drop out; bars are 95 %. A hollow dot's interval holds zero." +
        (sweep.complete ? "" : " Each point is compared with the first of its input only: there are too many pairs."),
    ),
    box,
  );
}
function gridView(sweep) {
  const grids = sweep.grid.map((grid) => {
    const rows = grid.kinds[0].length,
      same = [...Array(rows).keys()].filter((i) => grid.kinds.every((k) => k[i] === grid.kinds[0][i])).length;
    const labels = labelsOf(grid.points.map((i) => sweep.points[i])),
      label = (i) => labels[i],
      line = 20;
    let wide = 0;
    const { node, canvas } = surface(grid.points.length * line + 2, (pen, width) => {
      const inks = ["--failed", "--wrong", "--right", "--scored"].map(colour),
        measured = (text) => pen.measureText(text).width;
      pen.font = "12px sans-serif";
      wide = Math.min(Math.max(...labels.map(measured)) + 12, width * 0.5);
      const cell = (width - wide) / rows;
      pen.textBaseline = "middle";
      grid.kinds.forEach((kinds, y) => {
        pen.globalAlpha = 1;
        pen.fillStyle = colour("--ink");
        let text = label(y);
        while (text.length > 3 && measured(text) > wide - 11)
          text = `${text.slice(0, -2)}…`.replace("……", "…");
        pen.fillText(text, 0, y * line + line / 2);
        for (let i = 0; i < rows; i++) {
          pen.globalAlpha = kinds[i] === "2" ? 0.4 : 1;
          pen.fillStyle = inks[kinds[i]];
          pen.fillRect(wide + i * cell, y * line + 2, Math.max(0.6, cell - (cell > 4 ? 1 : 0)), line - 4);
        }
      });
    });
    canvas.addEventListener("mousemove", (e) => {
      const i = Math.floor((e.offsetX - wide) / ((canvas.clientWidth - wide) / rows)),
        y = Math.floor(e.offsetY / line);
      if (i >= 0 && i < rows && grid.kinds[y])
        showTip(e.clientX, e.clientY, `row ${i + 1} · ${label(y)}\n${KINDS[grid.kinds[y][i]]}`);
      else hideTip();
    });
    canvas.addEventListener("mouseleave", hideTip);
    return el(
      "div",
      {},
      el(
        "p",
        { cls: "muted small", style: { margin: "4px 0 8px" } },
        `${grid.task}: ${whole(same)} of ${many(rows, "row")} are the same in ${grid.points.length === 2 ? "both" : `all ${grid.points.length}`} points${grid.rows > rows ? `; the first ${whole(rows)} of ${whole(grid.rows)} are drawn` : ""}.`,
      ),
      node,
    );
  });
  return (
    grids.length > 0 &&
    card(
      el("h2", {}, "Which rows change"),
      el(
        "div",
        { cls: "lab" },
        el(
          "span",
          {},
          KINDS.map((k, i) => keyOf(`var(--${k})`, k)),
        ),
      ),
      el("div", { cls: "stack" }, grids),
    )
  );
}
function sweepView(sweep) {
  const plots = linePlots(sweep.folded.length ? sweep.folded : sweep.points);
  const notes = [...sweep.missing, ...sweep.points.flatMap((p) => p.notes.map((n) => `${p.name}: ${n}`))];
  return el(
    "div",
    { cls: "stack" },
    noteList(notes),
    sweep.folded.length > 0 && card("Means over seeds ± their standard errors", sweepTable(sweep.folded)),
    plots.length > 0 && el("div", { cls: "stack" }, plots),
    sweep.folded.length > 0 && !plots.length && el("div", { cls: "stack" }, metricPlots(sweep.folded, "seed")),
    sweep.folded.length
      ? card(null, el("details", {}, el("summary", {}, el("span", {}, `All ${whole(sweep.points.length)} points`)), sweepTable(sweep.points)))
      : card("Points", sweepTable(sweep.points)),
    !sweep.folded.length && !plots.length && el("div", { cls: "stack" }, metricPlots(sweep.points, "row")),
  );
}

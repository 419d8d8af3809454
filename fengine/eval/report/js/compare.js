// Two runs: whether they are the same, where they part, by how much, and why they may.
function runLine(name, run) {
  const state = `${run.task[0]} on ${run.model}: ${many(run.here, "row")}${run.finished ? "" : " (not at its end)"}`,
    counts = KINDS.map((k, i) => run.counts[k] > 0 && pill(i, `${whole(run.counts[k])} ${k}`)),
    below = { style: { "margin-top": "8px" } };
  return div(
    null,
    el("h2", {}, `${name} · ${run.folder}`),
    el("p", { cls: "small" }, state),
    el("div", { cls: "chips", style: { "margin-top": "6px" } }, counts),
    run.notes.length > 0 && el("div", below, noteList(run.notes)),
  );
}
// A paired difference as a row of `intervals`; d: {value, stderr, low, high, n, up, down}.
const deltaRow = (name, d) => ({
  label: name,
  value: d.value,
  low: d.low,
  high: d.high,
  hollow: d.low <= 0 && d.high >= 0,
  figure: `${signed(d.value)} ± ${fixed(d.stderr)}`,
  title:
    `${signed(d.value)}, standard error ${fixed(d.stderr)}, ${many(d.n, "row")}` +
    (d.up === null ? "" : `, ${d.up} up, ${d.down} down`),
});
function diffHead(diff) {
  const same = `${many(diff.rows, "row")}, ${many(diff.tokens, "token")}, every bit of every logprob.`;
  if (diff.same) return div("note good", el("b", {}, "The same. "), same);
  const kinds = Object.entries(diff.rows_with).map(([k, n]) => `${k} in ${many(n, "row")}`),
    differ = `${whole(diff.differing_rows)} of ${many(diff.rows, "row")} that both have differ`;
  const only = [
    ["A", diff.only_a, diff.only_a_ids],
    ["B", diff.only_b, diff.only_b_ids],
  ]
    .filter(([, n]) => n)
    .map(([name, n, ids]) => `Only in ${name}: ${many(n, "row")}: ${ids.join(", ")}${ids.length < n ? ", …" : ""}`);
  return div(
    "note bad",
    el("b", {}, diff.rows ? differ : "The runs have no row in common."),
    kinds.length > 0 && `: ${kinds.join(", ")}.`,
    only.map((o) => div(null, o)),
  );
}
function causesCard(diff) {
  const lines = diff.causes.map((line) => {
    const at = line.indexOf(": "),
      [first, ...rest] = line.slice(at + 2).split(" → ");
    return [line.slice(0, at), el("code", {}, first), el("code", {}, rest.join(" → "))];
  });
  const none = diff.same
    ? "Both depend on the same things."
    : "By their manifests both depend on the same things, so that their records should be the same.";
  const found = lines.length ? table(["in what they depend on", "A", "B"], lines) : el("p", {}, none);
  return card("Why they may differ", found);
}
function histogramCard(diff) {
  const power = (x) => x.toExponential(0),
    name = (low, high) => (low === 0 ? `< ${power(high)}` : high === null ? `≥ ${power(low)}` : power(low)),
    bins = diff.histogram.map(([low, high, n]) => [name(low, high), n]),
    describe = "Histogram of differences of logprobs";
  return card(
    "How far logprobs differ",
    hint(
      `|Δ| of ${whole(diff.differing_logprobs)} of ${whole(diff.logprobs)} logprobs at equal tokens, `,
      `${whole(diff.differing_bits)} bits in all; the largest is ${diff.largest_delta.toPrecision(3)}. `,
      "Heights are square roots.",
    ),
    fluid((width) => histogram(width < 520 ? thin(bins) : bins, { width, describe })),
  );
}
function thin(bins) {
  // neighbours joined, where there is little room
  const found = [];
  for (let i = 0; i < bins.length; i += 2) found.push([bins[i][0], bins[i][1] + (bins[i + 1]?.[1] || 0)]);
  return found;
}
function diffSummary({ diff, runs: [a, b] }) {
  const metrics = Object.entries(diff.metrics).map(([name, d]) => deltaRow(name, d)),
    metricsCard = card(
      "Metrics, B − A",
      hint(
        "Over the rows that both have, with the standard error of the differences themselves; bars are 95 %. ",
        "A hollow dot's interval holds zero.",
      ),
      fluid((width) => intervals(metrics, { zero: 0, width, describe: "Differences of metrics" }), 620),
    );
  return div(
    "stack",
    diffHead(diff),
    card(null, div("pairs", runLine("A", a), runLine("B", b))),
    div("cols", causesCard(diff), metricsCard),
    diff.differing_logprobs > 0 && histogramCard(diff),
  );
}

// One answer of both runs, beside one another.
function answerPair(ctx, one, i, heats) {
  const place = [one.token, one.logprob].find((found) => found?.[0] === i)?.[1];
  const side = (row, name) => {
    const a = row.a[i],
      title = el("h3", {}, name);
    if (!a) return div(null, title, el("p", { cls: "muted" }, "no such answer"));
    const heat = a.k.length ? heatmap(ctx, a, { first: place }) : null;
    if (heat) heats.push(heat);
    return div(null, title, answerHead(a, i, row), tokensOf(heat));
  };
  return div("pairs answer", one.pair.map((row, k) => side(row, "AB"[k])));
}
function differing(ctx, one) {
  const heats = [],
    most = Math.max(0, ...(one.pair || []).map((row) => row.a.length)),
    pairs = Array.from({ length: most }, (_, i) => answerPair(ctx, one, i, heats));
  const places = [
    one.token && `tokens part at answer ${one.token[0] + 1}, token ${one.token[1] + 1}`,
    one.logprob && `bits of logprobs at answer ${one.logprob[0] + 1}, token ${one.logprob[1] + 1}`,
    isNumber(one.largest) && one.largest > 0 && `largest |Δlogprob| ${one.largest.toPrecision(3)}`,
    one.other.length > 0 && `also: ${one.other.join(", ")}`,
  ].filter(Boolean);
  const told = (d) =>
    d.token === null
      ? "the answer has ended"
      : `token ${d.token}, logprob ${d.logprob ?? "–"} ${d.bits ? `(${d.bits})` : ""}`;
  const sides = one.sides?.map((d, k) => div("mono", `${"AB"[k]}  `, told(d))),
    errors = one.pair?.map((row, k) => row.e && div("note bad", `${"AB"[k]}: ${row.e.join(": ")}`)),
    prompts = one.pair?.[0].p.filter((p) => p.length).map((p) => promptBlock(ctx, p));
  return div(
    "stack",
    card(
      el("h2", {}, one.id),
      el("p", { cls: "small" }, places.join(" · ")),
      sides && el("div", { cls: "pairs small", style: { "margin-top": "8px" } }, sides),
      errors,
      prompts?.map((prompt) => el("div", { style: { "margin-top": "10px" } }, prompt)),
    ),
    one.pair
      ? pairs.length > 0 && card(null, measureBar(ctx, heats), pairs)
      : el("p", { cls: "muted" }, "Too large for this file; megabytes=M makes room."),
  );
}
function diffRows(data) {
  const { firsts, differing_rows: count, rows } = data.diff;
  if (!firsts.length) return el("p", { cls: "muted" }, rows ? "No row differs." : "The runs have no row in common.");
  const recorded = firsts.some((f) => f.pair?.some((r) => r.a.some((a) => a.top))),
    ctx = { vocab: data.vocab, recorded };
  const parts = (one) => {
    const [sign, text] = one.token
      ? ["≠", "another token"]
      : one.logprob
        ? ["≈", "only bits of logprobs"]
        : ["…", one.other.join(", ")];
    const place = one.token || one.logprob;
    const where = span("muted num", place ? `token ${place[1] + 1}` : "");
    return [silent("sign", sign), span("id", one.id), where, span("say", text)];
  };
  const list = picker("Rows that differ", parts, (one) => differing(ctx, one));
  list.fill(firsts.map((one, n) => Object.assign(one, { n })));
  const note = `The first ${whole(firsts.length)} of ${whole(count)} rows that differ.`;
  return div(
    null,
    count > firsts.length && el("div", { cls: "note plain", style: { "margin-bottom": "14px" } }, note),
    list.node,
  );
}

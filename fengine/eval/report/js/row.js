// One row: its prompt, its answers, its scores and columns.

function answerHead(a, i, row) {
  const n = a.l.length,
    sum = a.l.reduce((s, x) => s + (isNumber(x) ? x : 0), 0),
    judged = a.kind === "judge",
    number = judged ? i + 1 - row.a.length / 2 : i + 1;
  const picked = row.sc?.picked !== undefined && a.t.trim() === String(row.sc.picked).trim();
  const facts = [
    many(a.m || a.k.length, "token"),
    n > 0 && `Σ logprob ${fixed(sum, 3)}`,
    n > 1 && `perplexity ${short(Math.exp(-sum / n))}`,
    (!a.kind || judged) && a.f, // what is only read always ends by its length
    a.seed && `seed ${a.seed}`,
  ].filter(Boolean);
  const kind = { loglikelihood: "Choice", judge: "Verdict" }[a.kind] || "Answer",
    name = row.a.length > 1 ? `${kind} ${number}` : a.kind === "rolling" ? "Text" : "Answer";
  const title = el("h2", {}, name, picked && " ", picked && span("pill k3", "picked"));
  return div("head", title, span("muted small num", facts.join(" · ")));
}
const textBlock = (name, text) => el("div", { cls: "prompt", tabindex: "0", "aria-label": name }, text);
const promptBlock = (ctx, prompt) =>
  textBlock(
    "Prompt",
    typeof prompt === "string" ? prompt : prompt.map((id) => tokenText(ctx, id) ?? `#${id} `).join(""),
  );
const tokensOf = (heat) => (heat ? heat.node : el("p", { cls: "muted" }, "No tokens."));

function measureBar(ctx, heats) {
  const ends = [span(null), span(null)];
  const pick = (v) => {
    measure = v;
    ends[0].textContent = MEASURES[v].low;
    ends[1].textContent = MEASURES[v].high;
    heats.forEach((h) => h.recolour());
  };
  const options = [
    ["logprob", "Surprise (−logprob)"],
    ["entropy", "Entropy"],
    ["rank", "Rank"],
  ];
  pick(ctx.recorded ? measure : "logprob");
  return div(
    "legend",
    ctx.recorded ? choice("Colour", options, measure, pick) : span(null, "Colour: surprise, −logprob"),
    ends[0],
    silent("ramp"),
    ends[1],
    !ctx.recorded && span(null, "· likeliest tokens and entropy: run with top_logprobs=5"),
  );
}
function lostRow(row) {
  const where = `It is in outputs.jsonl, record ${row.n + 1}`,
    strange = `This record has parts that no run writes. ${where}.`,
    large = `This row alone has ${whole(row.lost)} bytes, too many for this file. ${where}`;
  const told = row.strange ? strange : `${large}; megabytes=M makes room for more.`;
  return div("stack", card(row.i, el("p", {}, told)));
}
function answerView(ctx, row, i, heats) {
  const a = row.a[i],
    heat = a.k.length ? heatmap(ctx, a, { quiet: row.a.length > 1 && i > 0 }) : null,
    lacks = heat && (a.m || !(a.k[0] in ctx.vocab)); // tokens do not tell the text
  if (heat) heats.push(heat);
  const text = lacks && el("div", { cls: "prompt", style: { "margin-top": "10px" } }, a.t);
  return div("answer", answerHead(a, i, row), tokensOf(heat), text);
}
function rowView(ctx, row) {
  if (row.lost !== undefined) return lostRow(row);
  const heats = [],
    seconds = isNumber(row.sec) ? ` · ${fixed(row.sec, 2)} s` : "",
    facts = div("chips", pill(row.s), span("muted small num", `row ${whole(row.n + 1)}${seconds}`)),
    answers = row.a.map((_, i) => answerView(ctx, row, i, heats));
  const prompts = row.p.map((p, i) => {
    const title = el("h3", { style: { margin: "2px 0 6px" } }, row.p.length > 1 ? `Prompt ${i + 1}` : "Prompt");
    return p.length > 0 && div(null, title, promptBlock(ctx, p));
  });
  const columns = row.d
    .filter(([k]) => k !== ctx.target)
    .map(([k, v]) => [k, v.length > 1000 ? el("div", { cls: "long", tabindex: "0" }, v) : v]);
  const scores = Object.entries(row.sc || {}).map(([k, v]) => [
    k,
    typeof v === "boolean" ? (v ? "yes" : "no") : typeof v === "number" ? short(v) : visible(String(v)),
  ]);
  const expected = el("h2", { style: { "margin-bottom": "6px" } }, "Expected");
  return div(
    "stack",
    card(
      div("head", el("h2", {}, row.i), facts),
      row.e && div("note bad", el("b", {}, `${row.e[0]}: `), row.e[1]),
      row.cut && div("note plain small", "This row is large: it is cut here, and whole in outputs.jsonl."),
      row.img && div("chips", row.img.map((src) => el("img", { src, alt: "picture of the row" }))),
      prompts,
    ),
    answers.length > 0 &&
      card(
        null,
        row.expected !== undefined && div("expected", expected, textBlock("Expected", row.expected)),
        measureBar(ctx, heats),
        answers,
      ),
    div(
      "cols",
      scores.length > 0 && card("Scores", table(["score", { text: "value", num: true }], scores)),
      columns.length > 0 && card("Columns of the input", pairTable(columns, { style: { "white-space": "pre-wrap" } })),
    ),
  );
}

// One row: its prompt, its answers, its scores and columns.

function answerHead(a, i, row) {
  const n = a.l.length,
    sum = a.l.reduce((s, x) => s + (isNumber(x) ? x : 0), 0);
  const picked = row.sc?.picked !== undefined && a.t.trim() === String(row.sc.picked).trim();
  const facts = [
    many(a.m || a.k.length, "token"),
    n > 0 && `Σ logprob ${fixed(sum, 3)}`,
    n > 1 && `perplexity ${short(Math.exp(-sum / n))}`,
    (!a.kind || a.kind === "judge") && a.f, // what is only read always ends by its length
    a.seed && `seed ${a.seed}`,
  ].filter(Boolean);
  const name =
    row.a.length > 1
      ? `${{ loglikelihood: "Choice", judge: "Verdict" }[a.kind] || "Answer"} ${a.kind === "judge" ? i + 1 - row.a.length / 2 : i + 1}`
      : a.kind === "rolling"
        ? "Text"
        : "Answer";
  return el(
    "div",
    { cls: "head" },
    el("h2", {}, name, picked && " ", picked && el("span", { cls: "pill k3" }, "picked")),
    el("span", { cls: "muted small num" }, facts.join(" · ")),
  );
}
function promptBlock(ctx, prompt) {
  const text = typeof prompt === "string" ? prompt : prompt.map((id) => tokenText(ctx, id) ?? `#${id} `).join("");
  return el("div", { cls: "prompt", tabindex: "0", "aria-label": "Prompt" }, text);
}
function measureBar(ctx, heats) {
  const ends = [el("span", {}), el("span", {})];
  const label = () => {
    ends[0].textContent = MEASURES[measure].low;
    ends[1].textContent = MEASURES[measure].high;
  };
  const options = [
    ["logprob", "Surprise (−logprob)"],
    ...(ctx.recorded
      ? [
          ["entropy", "Entropy"],
          ["rank", "Rank"],
        ]
      : []),
  ];
  if (!ctx.recorded) measure = "logprob";
  label();
  return el(
    "div",
    { cls: "legend" },
    options.length > 1
      ? choice("Colour", options, measure, (v) => {
          measure = v;
          label();
          heats.forEach((h) => h.recolour());
        })
      : el("span", {}, "Colour: surprise, −logprob"),
    ends[0],
    el("span", { cls: "ramp", "aria-hidden": "true" }),
    ends[1],
    !ctx.recorded && el("span", {}, "· likeliest tokens and entropy: run with top_logprobs=5"),
  );
}
function rowView(ctx, row, extra) {
  if (row.lost !== undefined)
    return el(
      "div",
      { cls: "stack" },
      extra,
      card(
        row.i,
        el(
          "p",
          {},
          row.strange
            ? `This record has parts that no run writes. It is in outputs.jsonl, record ${row.n + 1}.`
            : `This row alone has ${whole(row.lost)} bytes, too many for this file. It is in outputs.jsonl, record ${row.n + 1}; megabytes=M makes room for more.`,
        ),
      ),
    );
  const heats = [],
    blocks = [];
  const head = el(
    "div",
    { cls: "head" },
    el("h2", {}, row.i),
    el(
      "div",
      { cls: "chips" },
      pill(row.s),
      el(
        "span",
        { cls: "muted small num" },
        `row ${whole(row.n + 1)}${isNumber(row.sec) ? ` · ${fixed(row.sec, 2)} s` : ""}`,
      ),
    ),
  );
  const prompts = row.p.map(
    (p, i) =>
      p.length > 0 &&
      el(
        "div",
        {},
        el("h3", { style: { margin: "2px 0 6px" } }, row.p.length > 1 ? `Prompt ${i + 1}` : "Prompt"),
        promptBlock(ctx, p),
      ),
  );
  for (const [i, a] of row.a.entries()) {
    const heat = a.k.length ? heatmap(ctx, a, { quiet: row.a.length > 1 && i > 0 }) : null;
    if (heat) heats.push(heat);
    blocks.push(
      el(
        "div",
        { cls: "answer" },
        answerHead(a, i, row),
        heat ? heat.node : el("p", { cls: "muted" }, "No tokens."),
        heat && (a.m || !(a.k[0] in ctx.vocab)) && el("div", { cls: "prompt", style: { "margin-top": "10px" } }, a.t),
      ),
    );
  }
  const columns = row.d.filter(([k]) => k !== ctx.target);
  const scores = Object.entries(row.sc || {}).map(([k, v]) => [
    k,
    typeof v === "boolean" ? (v ? "yes" : "no") : typeof v === "number" ? short(v) : visible(String(v)),
  ]);
  return el(
    "div",
    { cls: "stack" },
    extra,
    card(
      head,
      row.e && el("div", { cls: "note bad" }, el("b", {}, `${row.e[0]}: `), row.e[1]),
      row.cut &&
        el("div", { cls: "note plain small" }, "This row is large: it is cut here, and whole in outputs.jsonl."),
      row.img && el("div", { cls: "chips" }, row.img.map((src) => el("img", { src, alt: "picture of the row" }))),
      prompts,
    ),
    row.a.length > 0 &&
      card(
        null,
        row.expected !== undefined &&
          el(
            "div",
            { cls: "expected" },
            el("h2", { style: { "margin-bottom": "6px" } }, "Expected"),
            el("div", { cls: "prompt", tabindex: "0", "aria-label": "Expected" }, row.expected),
          ),
        measureBar(ctx, heats),
        blocks,
      ),
    el(
      "div",
      { cls: "cols" },
      scores.length > 0 && card("Scores", table(["score", { text: "value", num: true }], scores)),
      columns.length > 0 &&
        card(
          "Columns of the input",
          el(
            "table",
            {},
            el(
              "tbody",
              {},
              columns.map(([k, v]) =>
                el("tr", {}, el("td", { cls: "key" }, k), el("td", { style: { "white-space": "pre-wrap" } }, v.length > 1000 ? el("div", { cls: "long", tabindex: "0" }, v) : v)),
              ),
            ),
          ),
        ),
    ),
  );
}

// Two runs: whether they are the same, where they part, by how much, and why they may.
function runLine(name, run) {
  return el(
    "div",
    {},
    el("h2", {}, `${name} · ${run.folder}`),
    el(
      "p",
      { cls: "small" },
      `${run.task[0]} on ${run.model}: ${many(run.here, "row")}${run.finished ? "" : " (not at its end)"}`,
    ),
    el(
      "div",
      { cls: "chips", style: { "margin-top": "6px" } },
      KINDS.map((k, i) => run.counts[k] > 0 && pill(i, `${whole(run.counts[k])} ${k}`)),
    ),
    run.notes.length > 0 && el("div", { style: { "margin-top": "8px" } }, noteList(run.notes)),
  );
}
function diffSummary(data) {
  const {
      diff,
      runs: [a, b],
    } = data,
    whatDiffers = Object.entries(diff.rows_with).map(([k, n]) => `${k} in ${many(n, "row")}`);
  const only = [
    ["A", diff.only_a, diff.only_a_ids],
    ["B", diff.only_b, diff.only_b_ids],
  ]
    .filter(([, n]) => n)
    .map(([name, n, ids]) => `Only in ${name}: ${many(n, "row")}: ${ids.join(", ")}${ids.length < n ? ", …" : ""}`);
  const head = diff.same
    ? el(
        "div",
        { cls: "note good" },
        el("b", {}, "The same. "),
        `${many(diff.rows, "row")}, ${many(diff.tokens, "token")}, every bit of every logprob.`,
      )
    : el(
        "div",
        { cls: "note bad" },
        el(
          "b",
          {},
          diff.rows
            ? `${whole(diff.differing_rows)} of ${many(diff.rows, "row")} that both have differ`
            : "The runs have no row in common.",
        ),
        whatDiffers.length > 0 && `: ${whatDiffers.join(", ")}.`,
        only.map((o) => el("div", {}, o)),
      );
  const bins = diff.histogram.map(([low, high, n]) => [
    low === 0 ? `< ${high.toExponential(0)}` : high === null ? `≥ ${low.toExponential(0)}` : low.toExponential(0),
    n,
  ]);
  const metrics = Object.entries(diff.metrics).map(([name, d]) => ({
    label: name,
    value: d.value,
    low: d.low,
    high: d.high,
    hollow: d.low <= 0 && d.high >= 0,
    figure: `${signed(d.value)} ± ${fixed(d.stderr)}`,
    title: `${signed(d.value)}, standard error ${fixed(d.stderr)}, ${many(d.n, "row")}${d.up === null ? "" : `, ${d.up} up, ${d.down} down`}`,
  }));
  return el(
    "div",
    { cls: "stack" },
    head,
    card(null, el("div", { cls: "pairs" }, runLine("A", a), runLine("B", b))),
    el(
      "div",
      { cls: "cols" },
      card(
        "Why they may differ",
        diff.causes.length
          ? table(
              ["in what they depend on", "A", "B"],
              diff.causes.map((line) => {
                const at = line.indexOf(": "),
                  [x, y] = [line.slice(at + 2).split(" → ")].map((p) => [p[0], p.slice(1).join(" → ")])[0];
                return [line.slice(0, at), el("code", {}, x), el("code", {}, y)];
              }),
            )
          : el(
              "p",
              {},
              diff.same
                ? "Both depend on the same things."
                : "By their manifests both depend on the same things, so that their records should be the same.",
            ),
      ),
      card(
        "Metrics, B − A",
        el(
          "p",
          { cls: "muted small" },
          "Over the rows that both have, with the standard error of the differences themselves; bars are 95 %. A hollow dot's interval holds zero.",
        ),
        fluid((w) => intervals(metrics, { zero: 0, width: w, describe: "Differences of metrics" }), 620),
      ),
    ),
    diff.differing_logprobs > 0 &&
      card(
        "How far logprobs differ",
        el(
          "p",
          { cls: "muted small" },
          `|Δ| of ${whole(diff.differing_logprobs)} of ${whole(diff.logprobs)} logprobs at equal tokens, ${whole(diff.differing_bits)} bits in all; the largest is ${diff.largest_delta.toPrecision(3)}. Heights are square roots.`,
        ),
        fluid((w) =>
          histogram(w < 520 ? thin(bins) : bins, { width: w, describe: "Histogram of differences of logprobs" }),
        ),
      ),
  );
}
function thin(bins) {
  // neighbours joined, where there is little room
  const found = [];
  for (let i = 0; i < bins.length; i += 2) found.push([bins[i][0], bins[i][1] + (bins[i + 1]?.[1] || 0)]);
  return found;
}
function diffRows(data) {
  const { firsts, differing_rows: count } = data.diff,
    ctx = { vocab: data.vocab, recorded: firsts.some((f) => f.pair?.some((r) => r.a.some((a) => a.top))) };
  const detail = el("div", { cls: "detail" }),
    browse = el("div", { cls: "browse" });
  const show = (one) => {
    const heats = [],
      pairs = [];
    const close = () => {
      browse.classList.remove("open");
      list.focus();
    };
    const back = button("‹ All rows", close, { cls: "quiet back" });
    if (one.pair) {
      for (let i = 0; i < Math.max(one.pair[0].a.length, one.pair[1].a.length); i++) {
        pairs.push(
          el(
            "div",
            { cls: "pairs answer" },
            one.pair.map((row, side) => {
              const a = row.a[i];
              if (!a) return el("div", {}, el("h3", {}, "AB"[side]), el("p", { cls: "muted" }, "no such answer"));
              const at = one.token?.[0] === i ? one.token[1] : one.logprob?.[0] === i ? one.logprob[1] : undefined,
                heat = a.k.length ? heatmap(ctx, a, { first: at }) : null;
              if (heat) heats.push(heat);
              return el(
                "div",
                {},
                el("h3", {}, "AB"[side]),
                answerHead(a, i, row),
                heat ? heat.node : el("p", { cls: "muted" }, "No tokens."),
              );
            }),
          ),
        );
      }
    }
    const places = [
      one.token && `tokens part at answer ${one.token[0] + 1}, token ${one.token[1] + 1}`,
      one.logprob && `bits of logprobs at answer ${one.logprob[0] + 1}, token ${one.logprob[1] + 1}`,
      isNumber(one.largest) && one.largest > 0 && `largest |Δlogprob| ${one.largest.toPrecision(3)}`,
      one.other.length > 0 && `also: ${one.other.join(", ")}`,
    ].filter(Boolean);
    const sides =
      one.sides &&
      el(
        "div",
        { cls: "pairs small", style: { "margin-top": "8px" } },
        one.sides.map((d, side) =>
          el(
            "div",
            { cls: "mono" },
            `${"AB"[side]}  `,
            d.token === null
              ? "the answer has ended"
              : `token ${d.token}, logprob ${d.logprob ?? "–"} ${d.bits ? `(${d.bits})` : ""}`,
          ),
        ),
      );
    const error = one.pair?.map(
      (row, side) => row.e && el("div", { cls: "note bad" }, `${"AB"[side]}: ${row.e.join(": ")}`),
    );
    detail.replaceChildren(
      back,
      el(
        "div",
        { cls: "stack" },
        card(
          el("h2", {}, one.id),
          el("p", { cls: "small" }, places.join(" · ")),
          sides,
          error,
          one.pair?.[0].p
            .filter((p) => p.length)
            .map((p) => el("div", { style: { "margin-top": "10px" } }, promptBlock(ctx, p))),
        ),
        one.pair
          ? pairs.length > 0 && card(null, measureBar(ctx, heats), pairs)
          : el("p", { cls: "muted" }, "Too large for this file; megabytes=M makes room."),
      ),
    );
  };
  const list = el("div", {
    cls: "card list",
    role: "listbox",
    "aria-label": "Rows that differ",
    tabindex: "0",
    style: { contain: "none" },
  });
  const items = firsts.map((one) =>
    el(
      "div",
      {
        cls: "item",
        role: "option",
        id: `differs-${firsts.indexOf(one)}`,
        "aria-selected": "false",
        style: { position: "relative" },
        onclick: () => pick(items.indexOf(node(one))),
      },
      el("span", { cls: "sign", "aria-hidden": "true" }, one.token ? "≠" : one.logprob ? "≈" : "…"),
      el("span", { cls: "id" }, one.id),
      el(
        "span",
        { cls: "muted num" },
        one.token ? `token ${one.token[1] + 1}` : one.logprob ? `token ${one.logprob[1] + 1}` : "",
      ),
      el(
        "span",
        { cls: "say" },
        one.token ? "another token" : one.logprob ? "only bits of logprobs" : one.other.join(", "),
      ),
    ),
  );
  const node = (one) => items[firsts.indexOf(one)];
  let at = 0;
  function pick(i, open = true) {
    at = Math.max(0, Math.min(items.length - 1, i));
    items.forEach((item, k) => item.setAttribute("aria-selected", String(k === at)));
    items[at].scrollIntoView({ block: "nearest" });
    list.setAttribute("aria-activedescendant", items[at].id);
    show(firsts[at]);
    if (open) browse.classList.add("open");
  }
  list.addEventListener("keydown", (e) => {
    const by = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[e.key];
    if (by) {
      e.preventDefault();
      pick(at + by, false);
    } else if (e.key === "Enter") browse.classList.add("open");
  });
  list.append(...items);
  browse.append(list, detail);
  if (firsts.length) pick(0, false);
  return firsts.length
    ? el(
        "div",
        {},
        count > firsts.length &&
          el(
            "div",
            { cls: "note plain", style: { "margin-bottom": "14px" } },
            `The first ${whole(firsts.length)} of ${whole(count)} rows that differ.`,
          ),
        browse,
      )
    : el("p", { cls: "muted" }, data.diff.rows ? "No row differs." : "The runs have no row in common.");
}

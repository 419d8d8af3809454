// One row: its prompt, its answers token by token, its scores and columns.
const MOST_TOKENS = 3000;  // drawn at once
const SPECIAL = /^<[|/]?[\w ]+[|]?>$/;  // looks like a special token
const NATS = 6;  // the surprise at which the colour is full: a probability of 0.25 %

const tokenText = (ctx, id) => ctx.vocab[id];
function entropyOf(top) {  // of the recorded tokens, all others as one outcome: a lower bound
  let sum = 0, seen = 0;
  for (const [lp] of top) if (isNumber(lp)) { const p = Math.exp(lp); sum -= p * lp; seen += p; }
  const rest = Math.max(0, 1 - seen);
  return sum - (rest > 1e-9 ? rest * Math.log(rest) : 0);
}
const rankOf = (top, id) => { const at = top.findIndex(([, one]) => one === id); return at < 0 ? null : at + 1; };
const MEASURES = {
  logprob: { name: "surprise", low: "certain", high: `≤ ${percent(Math.exp(-NATS))}`, of: (a, i) => (isNumber(a.l[i]) ? Math.min(1, -a.l[i] / NATS) : 1) },
  entropy: { name: "entropy", low: "0", high: "≥ 3 nats", of: (a, i) => (a.top?.[i]?.length ? Math.min(1, entropyOf(a.top[i]) / 3) : 0) },
  rank: { name: "rank", low: "1st", high: "not among those recorded", of: (a, i) => { const top = a.top?.[i] || [], r = rankOf(top, a.k[i]); return r === null ? 1 : Math.min(1, (r - 1) / 5); } },
};
let measure = "logprob";

function describeToken(ctx, a, i) {
  const text = tokenText(ctx, a.k[i]), top = a.top?.[i];
  const parts = [`${text === undefined ? "" : `“${visible(text)}”  `}id ${a.k[i]}, token ${i + 1}`];
  if (isNumber(a.l[i])) parts.push(`logprob ${fixed(a.l[i])}  (${percent(Math.exp(a.l[i]))})`);
  else parts.push("no logprob");
  if (top?.length) {
    const rank = rankOf(top, a.k[i]);
    parts.push(`rank ${rank === null ? `behind ${top.length}` : rank}, entropy ≥ ${fixed(entropyOf(top), 3)} nats`);
    for (const [lp, id] of top.slice(0, 6)) parts.push(`${id === a.k[i] ? "▸ " : "   "}${visible(tokenText(ctx, id) ?? `#${id}`)}  ${isNumber(lp) ? percent(Math.exp(lp)) : "–"}`);
  }
  return parts.join("\n");
}
function peekInto(box, ctx, a, i) {
  const text = tokenText(ctx, a.k[i]), top = a.top?.[i];
  const head = el("div", {}, el("b", {}, text === undefined ? `#${a.k[i]}` : `“${visible(text)}”`), el("span", { cls: "muted" }, `  token ${i + 1} of ${whole(a.m || a.k.length)} · id ${a.k[i]}`),
    isNumber(a.l[i]) && el("div", { cls: "num" }, `logprob ${fixed(a.l[i])} · probability ${percent(Math.exp(a.l[i]))}${top?.length ? ` · entropy ≥ ${fixed(entropyOf(top), 3)} nats` : ""}`));
  const bars = top?.length ? el("div", { cls: "top-k" }, top.map(([lp, id]) => {
    const p = isNumber(lp) ? Math.exp(lp) : 0;
    return [el("span", { cls: `mono ${id === a.k[i] ? "hit" : ""}` }, visible(tokenText(ctx, id) ?? `#${id}`)), el("i", { style: { width: `${Math.max(0.5, 100 * p)}%` } }), el("span", { cls: "num" }, percent(p))];
  })) : el("div", { cls: "muted" }, "The likeliest tokens beside it were not recorded: run with top_logprobs=5.");
  box.replaceChildren(head, bars);
}

// marks: {first}: the place from which on this answer differs from another one.
function heatmap(ctx, a, marks = {}) {
  const peek = el("div", { cls: "peek", "aria-live": "polite" }, el("span", { cls: "muted" }, "Choose a token to look into it; arrow keys go on."));
  const flow = el("div", { cls: "heat", role: "group", "aria-label": "Tokens of the answer" });
  let drawnTokens = 0, at = -1;
  const spans = [];
  const pick = (i, focus) => {
    if (i < 0 || i >= spans.length) return;
    if (at >= 0) { spans[at].classList.remove("at"); spans[at].tabIndex = -1; }
    at = i;
    spans[i].classList.add("at");
    spans[i].tabIndex = 0;
    if (focus) spans[i].focus();
    peekInto(peek, ctx, a, i);
  };
  const more = button("", () => draw(), { style: { "margin-top": "8px" } });
  function draw() {
    const end = Math.min(a.k.length, drawnTokens + MOST_TOKENS), batch = document.createDocumentFragment();
    for (let i = drawnTokens; i < end; i++) {
      const text = tokenText(ctx, a.k[i]), known = text !== undefined;
      const parts = !known ? `#${a.k[i]}` : /^\s+$/.test(text) || text === "" ? el("span", { cls: "ws" }, visible(text).replace("(nothing)", "∅")) : SPECIAL.test(text) ? el("span", { cls: "sp" }, text) : text;
      const span = el("span", { cls: `tok${known ? "" : " id"}${marks.first === i ? " off" : ""}`, tabindex: i ? -1 : 0, role: "button", "data-i": i }, parts);
      span.style.setProperty("--h", MEASURES[measure].of(a, i).toFixed(3));
      spans.push(span);
      batch.append(span);
      if (known && /\n$/.test(text)) batch.append("\n");
    }
    drawnTokens = end;
    flow.append(batch);
    more.textContent = `Show more (${whole(a.k.length - end)} tokens)`;
    more.hidden = end >= a.k.length;
  }
  flow.addEventListener("mouseover", (e) => { const i = e.target.closest(".tok")?.dataset.i; if (i !== undefined) showTip(e.clientX, e.clientY, describeToken(ctx, a, Number(i))); });
  flow.addEventListener("mouseleave", hideTip);
  flow.addEventListener("click", (e) => { const i = e.target.closest(".tok")?.dataset.i; if (i !== undefined) { hideTip(); pick(Number(i), true); } });
  flow.addEventListener("keydown", (e) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, Enter: 0, " ": 0 }[e.key];
    if (by !== undefined) { e.preventDefault(); pick(Number(e.target.dataset.i ?? 0) + by, true); }
  });
  draw();
  const recolour = () => spans.forEach((s, i) => s.style.setProperty("--h", MEASURES[measure].of(a, i).toFixed(3)));
  if (marks.first !== undefined && marks.first < spans.length) pick(marks.first, false);
  return { node: el("div", {}, flow, more, peek), recolour };
}

function answerHead(a, i, row) {
  const n = a.l.length, sum = a.l.reduce((s, x) => s + (isNumber(x) ? x : 0), 0);
  const picked = row.sc?.picked !== undefined && a.t.trim() === String(row.sc.picked).trim();
  const facts = [many(a.m || a.k.length, "token"), n > 0 && `Σ logprob ${fixed(sum, 3)}`, n > 1 && `perplexity ${short(Math.exp(-sum / n))}`, a.f, a.seed && `seed ${a.seed}`].filter(Boolean);
  const name = row.a.length > 1 ? `${a.kind === "loglikelihood" ? "Choice" : "Answer"} ${i + 1}` : a.kind === "rolling" ? "Text" : "Answer";
  return el("div", { cls: "head" }, el("h2", {}, name, picked && " ", picked && el("span", { cls: "pill k3" }, "picked")), el("span", { cls: "muted small num" }, facts.join(" · ")));
}
function promptBlock(ctx, prompt) {
  const text = typeof prompt === "string" ? prompt : prompt.map((id) => tokenText(ctx, id) ?? `#${id} `).join("");
  return el("div", { cls: "prompt", tabindex: "0", "aria-label": "Prompt" }, text);
}
function measureBar(ctx, heats) {
  const ends = [el("span", {}), el("span", {})];
  const label = () => { ends[0].textContent = MEASURES[measure].low; ends[1].textContent = MEASURES[measure].high; };
  const options = [["logprob", "Surprise (−logprob)"], ...(ctx.recorded ? [["entropy", "Entropy"], ["rank", "Rank"]] : [])];
  if (!ctx.recorded) measure = "logprob";
  label();
  return el("div", { cls: "legend" }, options.length > 1 ? choice("Colour", options, measure, (v) => { measure = v; label(); heats.forEach((h) => h.recolour()); }) : el("span", {}, "Colour: surprise, −logprob"), ends[0], el("span", { cls: "ramp", "aria-hidden": "true" }), ends[1],
    !ctx.recorded && el("span", {}, "· likeliest tokens and entropy: run with top_logprobs=5"));
}
function rowView(ctx, row, extra) {
  if (row.lost !== undefined) return el("div", { cls: "stack" }, extra, card(row.i, el("p", {}, `This row alone has ${whole(row.lost)} bytes, too many for this file. It is in outputs.jsonl, record ${row.n + 1}; megabytes=M makes room for more.`)));
  const heats = [], blocks = [];
  const head = el("div", { cls: "head" }, el("h2", {}, row.i), el("div", { cls: "chips" }, pill(row.s), el("span", { cls: "muted small num" }, `row ${whole(row.n + 1)}${isNumber(row.sec) ? ` · ${fixed(row.sec, 2)} s` : ""}`)));
  const prompts = row.p.map((p) => p.length > 0 && el("div", {}, el("h3", { style: { margin: "2px 0 6px" } }, row.p.length > 1 ? "Prompts" : "Prompt"), promptBlock(ctx, p)));
  for (const [i, a] of row.a.entries()) {
    const heat = a.k.length ? heatmap(ctx, a) : null;
    if (heat) heats.push(heat);
    blocks.push(el("div", { cls: "answer" }, answerHead(a, i, row), heat ? heat.node : el("p", { cls: "muted" }, "No tokens."),
      heat && (a.m || !(a.k[0] in ctx.vocab)) && el("div", { cls: "prompt", style: { "margin-top": "10px" } }, a.t)));
  }
  const scores = Object.entries(row.sc || {}).map(([k, v]) => [k, typeof v === "boolean" ? (v ? "yes" : "no") : typeof v === "number" ? short(v) : visible(String(v))]);
  return el("div", { cls: "stack" }, extra,
    card(head, row.e && el("div", { cls: "note bad" }, el("b", {}, `${row.e[0]}: `), row.e[1]), row.cut && el("div", { cls: "note plain small" }, "This row is large: it is cut here, and whole in outputs.jsonl."), prompts),
    row.a.length > 0 && card(null, measureBar(ctx, heats), blocks),
    el("div", { cls: "cols" }, scores.length > 0 && card("Scores", table(["score", { text: "value", num: true }], scores)),
      row.d.length > 0 && card("Columns of the input", el("table", {}, el("tbody", {}, row.d.map(([k, v]) => el("tr", {}, el("td", { cls: "key" }, k), el("td", { style: { "white-space": "pre-wrap" } }, v))))))));
}

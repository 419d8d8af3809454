// An answer token by token, coloured by how likely each was.
const MOST_TOKENS = 3000; // drawn at once
const SPECIAL = /^<[|/]?[\w ]+[|]?>$/; // looks like a special token
const NATS = 6; // the surprise at which the colour is full: a probability of 0.25 %

const tokenText = (ctx, id) => ctx.vocab[id];
function entropyOf(top) {
  // of the recorded tokens, all others as one outcome: a lower bound
  let sum = 0,
    seen = 0;
  for (const [lp] of top)
    if (isNumber(lp)) {
      const p = Math.exp(lp);
      sum -= p * lp;
      seen += p;
    }
  const rest = Math.max(0, 1 - seen);
  return sum - (rest > 1e-9 ? rest * Math.log(rest) : 0);
}
const rankOf = (top, id) => {
  const at = top.findIndex(([, one]) => one === id);
  return at < 0 ? null : at + 1;
};
const MEASURES = {
  logprob: {
    name: "surprise",
    low: "certain",
    high: `≤ ${percent(Math.exp(-NATS))}`,
    of: (a, i) => (isNumber(a.l[i]) ? Math.min(1, -a.l[i] / NATS) : 1),
  },
  entropy: {
    name: "entropy",
    low: "0",
    high: "≥ 3 nats",
    of: (a, i) => (a.top?.[i]?.length ? Math.min(1, entropyOf(a.top[i]) / 3) : 0),
  },
  rank: {
    name: "rank",
    low: "1st",
    high: "not among those recorded",
    of: (a, i) => {
      const top = a.top?.[i] || [],
        r = rankOf(top, a.k[i]);
      return r === null ? 1 : Math.min(1, (r - 1) / 5);
    },
  },
};
let measure = "logprob";

const tokenName = (ctx, id) => visible(tokenText(ctx, id) ?? `#${id}`);
const chance = (lp) => (isNumber(lp) ? percent(Math.exp(lp)) : "–");

function describeToken(ctx, a, i) {
  const text = tokenText(ctx, a.k[i]),
    top = a.top?.[i];
  const parts = [`${text === undefined ? "" : `“${visible(text)}”  `}id ${a.k[i]}, token ${i + 1}`];
  parts.push(isNumber(a.l[i]) ? `logprob ${fixed(a.l[i])}  (${chance(a.l[i])})` : "no logprob");
  if (top?.length) {
    const rank = rankOf(top, a.k[i]);
    parts.push(`rank ${rank === null ? `behind ${top.length}` : rank}, entropy ≥ ${fixed(entropyOf(top), 3)} nats`);
    for (const [lp, id] of top.slice(0, 6))
      parts.push(`${id === a.k[i] ? "▸ " : "   "}${tokenName(ctx, id)}  ${chance(lp)}`);
  }
  return parts.join("\n");
}
function peekInto(box, ctx, a, i) {
  const text = tokenText(ctx, a.k[i]),
    top = a.top?.[i] || [],
    entropy = top.length ? ` · entropy ≥ ${fixed(entropyOf(top), 3)} nats` : "";
  const head = div(
    null,
    el("b", {}, text === undefined ? `#${a.k[i]}` : `“${visible(text)}”`),
    span("muted", `  token ${i + 1} of ${whole(a.m || a.k.length)} · id ${a.k[i]}`),
    isNumber(a.l[i]) && div("num", `logprob ${fixed(a.l[i])} · probability ${chance(a.l[i])}${entropy}`),
  );
  const bars = top.map(([lp, id]) => {
    const p = isNumber(lp) ? Math.exp(lp) : 0;
    return [
      span(`mono ${id === a.k[i] ? "hit" : ""}`, tokenName(ctx, id)),
      el("i", { style: { width: `${Math.max(0.5, 100 * p)}%` } }),
      span("num", percent(p)),
    ];
  });
  const missing = "The likeliest tokens beside it were not recorded: run with top_logprobs=5.";
  box.replaceChildren(head, top.length ? div("top-k", bars) : div("muted", missing));
}

// marks: {first}: the place from which on this answer differs from another one.
function heatmap(ctx, a, marks = {}) {
  const peek = el(
    "div",
    { cls: "peek", "aria-live": "polite", hidden: marks.quiet },
    span("muted", "Choose a token to look into it; arrow keys go on."),
  );
  const flow = el("div", { cls: "heat", role: "group", "aria-label": "Tokens of the answer" });
  const spans = [],
    more = button("", draw, { style: { "margin-top": "8px" } }),
    heat = (i) => MEASURES[measure].of(a, i).toFixed(3);
  let at = -1;
  const pick = (i, focus) => {
    if (i < 0 || i >= spans.length) return;
    if (at >= 0) {
      spans[at].classList.remove("at");
      spans[at].tabIndex = -1;
    }
    at = i;
    spans[i].classList.add("at");
    spans[i].tabIndex = 0;
    if (focus) spans[i].focus();
    peek.hidden = false;
    peekInto(peek, ctx, a, i);
  };
  const inside = (text) =>
    /^\s*$/.test(text)
      ? span("ws", visible(text).replace("(nothing)", "∅"))
      : SPECIAL.test(text) ? span("sp", text) : text;
  function token(i) {
    const text = tokenText(ctx, a.k[i]),
      cls = `tok${text === undefined ? " id" : ""}${marks.first === i ? " off" : ""}`,
      props = { cls, tabindex: i ? -1 : 0, role: "button", "data-i": i, style: { "--h": heat(i) } };
    return el("span", props, text === undefined ? `#${a.k[i]}` : inside(text));
  }
  function draw() {
    const end = Math.min(a.k.length, spans.length + MOST_TOKENS);
    for (let i = spans.length; i < end; i++) {
      const text = tokenText(ctx, a.k[i]) ?? "";
      spans.push(token(i));
      flow.append(spans[i], ...(text.includes("\n") && !text.trim() ? ["\n"] : []));
    }
    more.textContent = `Show more (${whole(a.k.length - end)} tokens)`;
    more.hidden = end >= a.k.length;
  }
  const under = (e) => e.target.closest(".tok")?.dataset.i;
  flow.addEventListener("mouseover", (e) => {
    if (under(e) !== undefined) showTip(e.clientX, e.clientY, describeToken(ctx, a, Number(under(e))));
  });
  flow.addEventListener("mouseleave", hideTip);
  flow.addEventListener("click", (e) => {
    hideTip();
    if (under(e) !== undefined) pick(Number(under(e)), true);
  });
  flow.addEventListener("keydown", (e) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, Enter: 0, " ": 0 }[e.key];
    if (by !== undefined) {
      e.preventDefault();
      pick(Number(e.target.dataset.i ?? 0) + by, true);
    }
  });
  draw();
  const recolour = () => spans.forEach((s, i) => s.style.setProperty("--h", heat(i)));
  if (marks.first !== undefined && marks.first < spans.length) pick(marks.first, false);
  return { node: div(null, flow, more, peek), recolour };
}

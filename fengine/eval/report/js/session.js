// One session of the schedule: its plots under one cursor, and what the step at the cursor was.
const FACTS_MS = 100; // between two tables of a step
const MOST_ROWS = 40; // of such a table
const PHASES = ["queue", "prefill", "decode"];

function factsOf({ steps }, s) {
  const facts = [
    ["step", whole(steps.n[s])],
    ["kind", STEP_NAMES[steps.k[s]]],
    ["took", micros(steps.d[s])],
    ["tokens", whole(steps.tok[s])],
    ...(steps.guess[s] ? [["guesses, right", `${whole(steps.guess[s])}, ${whole(steps.right[s])}`]] : []),
    ["rows", whole(steps.row[s])],
    ["running", whole(steps.run[s])],
    ["waiting", whole(steps.wait[s])],
    ["pages held", whole(steps.held[s])],
    ["pages cached", whole(steps.idle[s])],
  ];
  return termList("stepfacts", facts);
}
// [sign and name, what it does, its new pages] of every request of a step.
function requestsOf(session, s, onrow) {
  const pages = new Map(); // request -> [hits, new ones] of this step
  for (const [, count, from, , place, hit] of session.holds) {
    if (from !== s) continue;
    const both = pages.get(place) || [0, 0];
    both[hit ? 0 : 1] += count;
    pages.set(place, both);
  }
  return session.requests.flatMap((one, i) => {
    const part = one.seg.find(([, from, to]) => from <= s && s <= to),
      out = one.pre.includes(s);
    if (!part && !out) return [];
    const [hits, grown] = pages.get(i) || [0, 0],
      name = one.id === undefined ? `request ${one.n}` : button(one.id, () => onrow(one.id)),
      news = [hits && `${hits} hit`, grown && `${grown} new`].filter(Boolean).join(", ");
    const words = out ? "preempted" : segmentWords(part, s);
    return [[span("lk nowrap", inkOf(ofRequest(i)), name), words, news || "–"]];
  });
}
function stepFacts(session, state, onrow) {
  const box = div(null);
  let last = 0,
    timer = null;
  const show = () => {
    [last, timer] = [performance.now(), null];
    const rows = requestsOf(session, state.step, onrow),
      more = rows.length - MOST_ROWS,
      long = { style: { "max-height": "330px", "overflow-y": "auto", "margin-top": "12px" }, tabindex: "0" },
      shown = table(["request", "does", "pages"], rows.slice(0, MOST_ROWS));
    box.replaceChildren(factsOf(session, state.step), el("div", long, shown, more > 0 && hint(`and ${more} more`)));
  };
  state.parts.push(() => {
    // a table is not laid out at every frame of a scrub: nobody reads so fast
    timer ??= setTimeout(show, Math.max(0, last + FACTS_MS - performance.now()));
  });
  return box;
}
function playButton(state, slider) {
  let timer = null;
  const play = button("▶", toggle, { "aria-label": "Play" });
  function step() {
    if (state.step >= state.axis.n - 1 || !slider.isConnected) toggle();
    else state.go(state.step + 1);
  }
  function toggle() {
    if (timer) clearInterval(timer);
    timer = timer ? null : setInterval(step, 60);
    play.textContent = timer ? "❚❚" : "▶";
  }
  return play;
}
function sessionView(session, onrow) {
  const { n: numbers, t } = session.steps,
    most = numbers.length - 1,
    state = { axis: axisOf(session), step: 0, request: null, parts: [] };
  const slider = el("input", {
    type: "range",
    min: 0,
    max: most,
    value: 0,
    "aria-label": "Step",
    oninput: () => state.go(Number(slider.value)),
  });
  const word = el("output", { cls: "num small nowrap" });
  let waiting = false;
  const paint = () => {
    waiting = false;
    state.parts.forEach((draw) => draw());
  };
  state.go = (step) => {
    state.step = Math.max(0, Math.min(most, step));
    state.axis.follow(state.step);
    slider.value = state.step;
    slider.setAttribute("aria-valuetext", `step ${numbers[state.step]}`);
    word.textContent = `step ${whole(numbers[state.step])} · ${micros(t[state.step])}`;
    if (!waiting) requestAnimationFrame(paint);
    waiting = true;
  };
  const zoom = (factor) => {
    state.axis.zoom(factor, state.step);
    state.go(state.step);
  };
  const fit = (by) => {
    state.axis.by = by;
    state.axis.reset();
    state.go(state.step);
  };
  const plots = div(
    null,
    stepsPlot(session, state),
    gaugesPlot(session, state),
    ganttPlot(session, state),
    session.holds.length > 0 && pagesPlot(session, state),
  );
  for (const canvas of plots.querySelectorAll("canvas"))
    if (!canvas.dataset.own)
      canvas.addEventListener("click", (e) => state.go(state.axis.at(e.offsetX, canvas.clientWidth)));
  const across = ["steps", "time"].map((by) => [by, by]);
  const tools = div(
    "tools",
    choice("Across", across, "steps", fit),
    div(
      "chips",
      button("+", () => zoom(0.5), { "aria-label": "Zoom in" }),
      button("−", () => zoom(2), { "aria-label": "Zoom out" }),
      button("Fit", () => fit(state.axis.by)),
    ),
  );
  const scrub = div(
    "scrub",
    playButton(state, slider),
    button("‹", () => state.go(state.step - 1), { "aria-label": "Step before" }),
    slider,
    button("›", () => state.go(state.step + 1), { "aria-label": "Next step" }),
    word,
  );
  const step = card("This step", stepFacts(session, state, onrow)),
    pages = session.holds.length > 0 && card("Pages", poolMap(session, state));
  state.go(Math.floor((most + 1) / 2));
  return div("stack", card(null, tools, plots, scrub), div("stepgrid", step, pages));
}
function spansView(session, onrow) {
  // of a trace that tells of requests only
  const rows = session.spans,
    line = 9,
    spans = rows.flatMap((r) => PHASES.map((phase) => r[phase] || [0, 0])),
    end = Math.max(1, ...spans.map(([start, took]) => start + took));
  const paint = (pen, width, i, y) => {
    for (const phase of PHASES) {
      const [start, took] = rows[i][phase] || [0, null];
      if (took === null) continue;
      pen.fillStyle = colour(`--${phase}`);
      pen.fillRect((start / end) * width, y, Math.max(1, (took / end) * width), line - 2);
    }
  };
  const { frame, canvas, under } = scroller(rows, line, 460, paint, surface);
  hover(canvas, (e) => {
    const r = rows[under(e)],
      took = r && PHASES.filter((phase) => r[phase]).map((phase) => `${phase} ${micros(r[phase][1])}`);
    return r && `row ${r.row + 1} · ${r.id}\n${took.join("\n")}`;
  });
  canvas.addEventListener("click", (e) => {
    const r = rows[under(e)];
    if (r) onrow(r.id);
  });
  const keys = PHASES.map((phase) => keyOf(`var(--${phase})`, phase));
  return card(null, plot(`${many(rows.length, "request")} over ${micros(end)}`, keys, frame));
}
function scheduleView(run, onrow) {
  const { sessions, notes } = run.schedule,
    box = div(null);
  const show = (at) => {
    drawn.clear();
    const one = sessions[at];
    box.replaceChildren(one.steps.n.length ? sessionView(one, onrow) : spansView(one, onrow));
  };
  if (sessions.length) show(0);
  const command = el("code", {}, "fengine eval … trace=steps");
  const told = notes.map((n) => div(null, n.includes("trace=steps") ? [`${n}: `, command] : n)),
    numbers = sessions.map((s, i) => [i, `${s.number}`]);
  return div(
    "stack",
    told.length > 0 && div("note plain", told),
    sessions.length > 1 && div(null, choice("Session", numbers, 0, (v) => show(Number(v)))),
    box,
  );
}

// One session of the schedule: its plots under one cursor, and what the step at the cursor was.
const FACTS_MS = 100; // between two tables of a step

function stepFacts(session, state, onrow) {
  const box = el("div", {}),
    { steps } = session;
  let last = 0,
    timer = null;
  state.parts.push(() => {
    // a table is not laid out at every frame of a scrub: nobody reads so fast
    timer ??= setTimeout(show, Math.max(0, last + FACTS_MS - performance.now()));
  });
  const show = () => {
    const s = state.step;
    [last, timer] = [performance.now(), null];
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
    const rows = [],
      pages = new Map(); // request -> [hits, new ones] of this step
    for (const [, count, from, , place, hit] of session.holds) {
      if (from !== s) continue;
      const both = pages.get(place) || [0, 0];
      both[hit ? 0 : 1] += count;
      pages.set(place, both);
    }
    let more = 0;
    session.requests.forEach((one, i) => {
      const part = one.seg.find(([, from, to]) => from <= s && s <= to),
        out = one.pre.includes(s);
      if (!part && !out) return;
      if (rows.length >= 40) return void more++;
      const [hits, grown] = pages.get(i) || [0, 0],
        sign = el("i", { style: { background: ofRequest(i) }, "aria-hidden": "true" });
      const name =
        one.id === undefined
          ? `request ${one.n}`
          : el("button", { type: "button", cls: "quiet", onclick: () => onrow(one.id) }, one.id);
      rows.push([
        el("span", { cls: "lk nowrap" }, sign, name),
        out ? "preempted" : segmentWords(part, s),
        [hits && `${hits} hit`, grown && `${grown} new`].filter(Boolean).join(", ") || "–",
      ]);
    });
    box.replaceChildren(
      el(
        "dl",
        { cls: "stepfacts" },
        facts.map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v))),
      ),
      el(
        "div",
        { style: { "max-height": "330px", "overflow-y": "auto", "margin-top": "12px" }, tabindex: "0" },
        table(["request", "does", "pages"], rows),
        more > 0 && el("p", { cls: "muted small" }, `and ${more} more`),
      ),
    );
  };
  return box;
}
function sessionView(session, onrow) {
  const n = session.steps.n.length,
    state = { axis: axisOf(session), step: 0, request: null, parts: [] };
  const slider = el("input", {
    type: "range",
    min: 0,
    max: n - 1,
    value: 0,
    "aria-label": "Step",
    oninput: () => state.go(Number(slider.value)),
  });
  const word = el("output", { cls: "num small nowrap" });
  let waiting = false;
  state.go = (step) => {
    state.step = Math.max(0, Math.min(n - 1, step));
    state.axis.follow(state.step);
    slider.value = state.step;
    slider.setAttribute("aria-valuetext", `step ${session.steps.n[state.step]}`);
    word.textContent = `step ${whole(session.steps.n[state.step])} · ${micros(session.steps.t[state.step])}`;
    if (!waiting) {
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        state.parts.forEach((draw) => draw());
      });
    }
  };
  const zoom = (factor) => {
    state.axis.zoom(factor, state.step);
    state.go(state.step);
  };
  let timer = null;
  const play = button(
    "▶",
    () => {
      if (timer) {
        clearInterval(timer);
        timer = null;
      } else
        timer = setInterval(() => {
          if (state.step >= n - 1 || !slider.isConnected) {
            play.click();
            return;
          }
          state.go(state.step + 1);
        }, 60);
      play.textContent = timer ? "❚❚" : "▶";
    },
    { "aria-label": "Play" },
  );
  const plots = el(
    "div",
    {},
    stepsPlot(session, state),
    gaugesPlot(session, state),
    ganttPlot(session, state),
    session.holds.length > 0 && pagesPlot(session, state),
  );
  for (const canvas of plots.querySelectorAll("canvas"))
    if (!canvas.dataset.own)
      canvas.addEventListener("click", (e) => state.go(state.axis.at(e.offsetX, canvas.clientWidth)));
  const tools = el(
    "div",
    { cls: "tools" },
    choice(
      "Across",
      [
        ["steps", "steps"],
        ["time", "time"],
      ],
      "steps",
      (v) => {
        state.axis.by = v;
        state.axis.reset();
        state.go(state.step);
      },
    ),
    el(
      "div",
      { cls: "chips" },
      button("+", () => zoom(0.5), { "aria-label": "Zoom in" }),
      button("−", () => zoom(2), { "aria-label": "Zoom out" }),
      button("Fit", () => {
        state.axis.reset();
        state.go(state.step);
      }),
    ),
  );
  const scrub = el(
    "div",
    { cls: "scrub" },
    play,
    button("‹", () => state.go(state.step - 1), { "aria-label": "Step before" }),
    slider,
    button("›", () => state.go(state.step + 1), { "aria-label": "Next step" }),
    word,
  );
  const node = el(
    "div",
    { cls: "stack" },
    el("section", { cls: "card" }, tools, plots, scrub),
    el(
      "div",
      { cls: "stepgrid" },
      card("This step", stepFacts(session, state, onrow)),
      session.holds.length > 0 && card("Pages", poolMap(session, state)),
    ),
  );
  state.go(Math.floor(n / 2));
  return node;
}
function spansView(session, onrow) {
  // of a trace that tells of requests only
  const rows = session.spans,
    line = 9,
    end = Math.max(
      1,
      ...rows.flatMap((r) => ["queue", "prefill", "decode"].map((p) => (r[p] ? r[p][0] + r[p][1] : 0))),
    );
  const view = Math.min(460, rows.length * line + 4),
    frame = el("div", {
      cls: "gantt",
      role: "group",
      tabindex: "0",
      "aria-label": `${rows.length} requests over time`,
      style: { height: `${view}px` },
    });
  const paint = (pen, width, height) => {
    const inks = { queue: colour("--queue"), prefill: colour("--prefill"), decode: colour("--decode") };
    for (
      let i = Math.floor(frame.scrollTop / line);
      i < Math.min(rows.length, Math.ceil((frame.scrollTop + height) / line));
      i++
    ) {
      for (const phase of ["queue", "prefill", "decode"]) {
        const span = rows[i][phase];
        if (span) {
          pen.fillStyle = inks[phase];
          pen.fillRect(
            (span[0] / end) * width,
            i * line - frame.scrollTop + 1,
            Math.max(1, (span[1] / end) * width),
            line - 2,
          );
        }
      }
    }
  };
  const { node, canvas, draw } = surface(view - 2, paint, () => [frame.scrollTop]);
  const under = (e) => rows[Math.floor((e.clientY - frame.getBoundingClientRect().top + frame.scrollTop) / line)];
  frame.append(node, el("div", { style: { height: `${Math.max(0, rows.length * line - view + 2)}px` } }));
  frame.addEventListener("scroll", draw, { passive: true });
  canvas.addEventListener("mousemove", (e) => {
    const r = under(e);
    if (r)
      showTip(
        e.clientX,
        e.clientY,
        `row ${r.row + 1} · ${r.id}\n${["queue", "prefill", "decode"]
          .filter((p) => r[p])
          .map((p) => `${p} ${micros(r[p][1])}`)
          .join("\n")}`,
      );
  });
  canvas.addEventListener("mouseleave", hideTip);
  canvas.addEventListener("click", (e) => {
    const r = under(e);
    if (r) onrow(r.id);
  });
  return card(
    null,
    plot(
      `${many(rows.length, "request")} over ${micros(end)}`,
      ["queue", "prefill", "decode"].map((p) => keyOf(`var(--${p})`, p)),
      frame,
    ),
  );
}
function scheduleView(run, onrow) {
  const { sessions, notes } = run.schedule,
    box = el("div", {});
  const show = (at) => {
    drawn.clear();
    const one = sessions[at];
    box.replaceChildren(one.steps.n.length ? sessionView(one, onrow) : spansView(one, onrow));
  };
  if (sessions.length) show(0);
  const told =
    notes.length > 0 &&
    el(
      "div",
      { cls: "note plain" },
      notes.map((n) =>
        el("div", {}, n.includes("trace=steps") ? [`${n}: `, el("code", {}, "fengine eval … trace=steps")] : n),
      ),
    );
  return el(
    "div",
    { cls: "stack" },
    told,
    sessions.length > 1 &&
      el(
        "div",
        {},
        choice(
          "Session",
          sessions.map((s, i) => [i, `${s.number}`]),
          0,
          (v) => show(Number(v)),
        ),
      ),
    box,
  );
}

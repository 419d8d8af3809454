// The scheduler over time: what steps computed, who waited, who ran. One cursor goes through all of it.
const TRACE_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7fd6", "#a8a032"];
const ofRequest = (place) => TRACE_COLOURS[place % TRACE_COLOURS.length];
const STEP_NAMES = ["decode", "prefill", "mixed"],
  STEP_INKS = ["--decode", "--prefill", "--mixed"];

// A canvas that is sharp, and painted again when its size, the colours, or what `shows` tells have changed. With `state`
// the cursor lies above it, so that moving it paints nothing. `draw` reads no layout: it is called at every frame.
function surface(height, paint, shows = () => [], state = null) {
  const canvas = el("canvas", {}),
    cursor = state && el("div", { cls: "cursor" }),
    node = el("div", { cls: "surface" }, canvas, cursor),
    pen = canvas.getContext("2d");
  let width = 0,
    known = "";
  const draw = () => {
    if (!width || !canvas.isConnected) return;
    const tall = typeof height === "function" ? height(width) : height,
      now = [width, tall, devicePixelRatio, document.documentElement.dataset.theme, ...shows()].join();
    if (known !== now) {
      known = now;
      repaint(pen, paint, width, tall);
    }
    if (!cursor) return;
    const a = state.axis.px(state.axis.left(state.step), width),
      wide = Math.max(1, state.axis.px(state.axis.right(state.step), width) - a);
    cursor.style.transform = `translateX(${a}px)`;
    cursor.style.width = `${wide.toFixed(2)}px`;
  };
  new ResizeObserver(([{ contentRect }]) => {
    width = Math.round(contentRect.width);
    requestAnimationFrame(draw); // not here, where a new height would be a loop
  }).observe(canvas);
  drawn.add(draw);
  return { node, canvas, draw };
}
function repaint(pen, paint, width, height) {
  const { canvas } = pen,
    scale = devicePixelRatio || 1,
    size = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) {
    [canvas.width, canvas.height] = size;
    canvas.style.height = `${height}px`;
  }
  pen.save();
  pen.scale(scale, scale);
  pen.clearRect(0, 0, width, height);
  paint(pen, width, height);
  pen.restore();
}
const shown = ({ axis }) => [axis.by, axis.from, axis.to];
const keyOf = (ink, text) =>
  el("span", { cls: "lk" }, el("i", { style: { background: ink }, "aria-hidden": "true" }), text);
const plot = (label, keys, node) =>
  el("div", { cls: "plot" }, el("div", { cls: "lab" }, el("span", {}, label), el("span", {}, keys)), node);

// Steps on an axis of time or of steps, from `from` to `to`.
function axisOf(session) {
  const { t, d } = session.steps,
    n = t.length;
  const axis = { by: "steps", n, from: 0, to: n };
  const end = (s) => t[s] + Math.max(d[s], 1);
  axis.reset = () => {
    [axis.from, axis.to] = axis.by === "steps" ? [0, n] : [t[0], end(n - 1)];
  };
  axis.left = (s) => (axis.by === "steps" ? s : s < n ? t[s] : end(n - 1));
  axis.right = (s) => (axis.by === "steps" ? s + 1 : s < n ? end(s) : end(n - 1));
  axis.px = (v, width) => ((v - axis.from) / (axis.to - axis.from)) * width;
  axis.at = (x, width) => {
    // the step under a place
    const v = axis.from + (x / width) * (axis.to - axis.from);
    if (axis.by === "steps") return Math.max(0, Math.min(n - 1, Math.floor(v)));
    let low = 0,
      high = n - 1;
    while (low < high) {
      const mid = (low + high + 1) >> 1;
      if (t[mid] <= v) low = mid;
      else high = mid - 1;
    }
    return low;
  };
  axis.zoom = (factor, s) => {
    const [least, most] = axis.by === "steps" ? [0, n] : [t[0], end(n - 1)],
      middle = (axis.left(s) + axis.right(s)) / 2;
    const span = Math.min(most - least, Math.max((most - least) / Math.max(1, n / 8), (axis.to - axis.from) * factor));
    axis.from = Math.max(least, Math.min(most - span, middle - span / 2));
    axis.to = axis.from + span;
  };
  axis.follow = (s) => {
    // brings a step into sight
    const span = axis.to - axis.from;
    if (axis.left(s) < axis.from || axis.right(s) > axis.to) {
      axis.zoom(1, s);
      axis.to = axis.from + span;
    }
  };
  return axis;
}
function stepsPlot(session, state) {
  const { tok, k, guess, right } = session.steps,
    most = Math.max(1, ...tok),
    guesses = guess.some(Boolean) ? [["guesses that were right", "--right"], ["wrong", "--wrong"]] : [];
  const { node, draw } = surface(
    84,
    (pen, width, height) => {
      const inks = STEP_INKS.map(colour),
        { axis } = state;
      for (let s = axis.at(0, width); s < axis.n && axis.left(s) <= axis.to; s++) {
        const a = axis.px(axis.left(s), width),
          b = axis.px(axis.right(s), width),
          tall = Math.max(2, (tok[s] / most) * (height - 4));
        const wide = Math.max(0.7, b - a - (b - a > 4 ? 1 : 0)),
          part = tall / Math.max(1, tok[s]);
        pen.fillStyle = inks[k[s]];
        pen.fillRect(a, height - tall, wide, tall);
        guesses.forEach(([, ink], i) => {
          pen.fillStyle = colour(ink);
          pen.fillRect(a, height - tall, wide, part * (i ? guess[s] - right[s] : guess[s]));
        });
      }
    },
    () => shown(state),
    state,
  );
  state.parts.push(draw);
  return plot(
    `Tokens of each step, up to ${whole(most)}`,
    [...STEP_NAMES.map((name, i) => [name, STEP_INKS[i]]), ...guesses].map(([name, ink]) => keyOf(`var(${ink})`, name)),
    node,
  );
}
function gaugesPlot(session, state) {
  const { run, wait, held, idle } = session.steps,
    pool = Math.max(1, session.pool),
    most = Math.max(1, ...run, ...wait);
  const lines = [
    ["running", run, most, "--decode"],
    ["waiting", wait, most, "--prefill"],
    ["pages held", held, pool, "--right"],
    ["pages only cached", idle, pool, "--scored"],
  ];
  const { node, draw } = surface(
    84,
    (pen, width, height) => {
      const { axis } = state;
      for (const [, values, top, ink] of lines) {
        pen.strokeStyle = colour(ink);
        pen.lineWidth = 1.6;
        pen.beginPath();
        for (let s = axis.at(0, width); s < axis.n && axis.left(s) <= axis.to; s++) {
          const y = height - 3 - (values[s] / top) * (height - 8);
          pen.lineTo(axis.px(axis.left(s), width), y);
          pen.lineTo(axis.px(axis.right(s), width), y);
        }
        pen.stroke();
      }
    },
    () => shown(state),
    state,
  );
  state.parts.push(draw);
  return plot(
    `Requests, up to ${whole(most)}, and pages, of ${whole(session.pool)}`,
    lines.map(([name, , , ink]) => keyOf(`var(${ink})`, name)),
    node,
  );
}
function ganttPlot(session, state) {
  const rows = session.requests,
    line = rows.length > 400 ? 7 : rows.length > 80 ? 11 : 16,
    view = Math.min(320, rows.length * line + 4);
  const frame = el("div", { cls: "gantt", role: "group", tabindex: "0", "aria-label": `${rows.length} requests over time` });
  let top = 0;
  const paint = (pen, width, height) => {
    const { axis } = state,
      inks = [colour("--decode"), colour("--prefill")],
      ink = colour("--ink");
    for (let i = Math.floor(top / line); i < Math.min(rows.length, Math.ceil((top + height) / line)); i++) {
      const y = i * line - top + 1,
        tall = line - (line > 8 ? 3 : 1);
      if (i === state.request) {
        pen.fillStyle = colour("--tint");
        pen.fillRect(0, y - 1, width, line);
      }
      for (const [kind, s0, s1] of rows[i].seg) {
        const a = axis.px(axis.left(s0), width),
          b = axis.px(axis.right(s1), width);
        if (b < 0 || a > width) continue;
        pen.fillStyle = inks[kind];
        pen.fillRect(a, y, Math.max(1, b - a - 0.5), tall);
      }
      pen.fillStyle = ink;
      for (const s of rows[i].pre) pen.fillRect(axis.px(axis.left(s), width) - 1, y - 1, 2.5, tall + 2);
      if (line >= 11) {
        // whose it is, at the colour of its pages
        const a = Math.max(0, axis.px(axis.left(rows[i].seg[0]?.[1] ?? 0), width) - 5);
        pen.fillStyle = ofRequest(i);
        pen.fillRect(a, y, 3, tall);
      }
    }
  };
  const { node, canvas, draw } = surface(view - 2, paint, () => [...shown(state), state.request, top], state);
  frame.style.height = `${view}px`;
  frame.append(node, el("div", { style: { height: `${Math.max(0, rows.length * line - view + 2)}px` } }));
  frame.addEventListener(
    "scroll",
    () => {
      top = frame.scrollTop;
      draw();
    },
    { passive: true },
  );
  const under = (e) => Math.floor((e.clientY - frame.getBoundingClientRect().top + frame.scrollTop) / line);
  canvas.addEventListener("mousemove", (e) => {
    const i = under(e),
      one = rows[i];
    if (!one) return hideTip();
    const s = state.axis.at(e.offsetX, canvas.clientWidth),
      part = one.seg.find(([, a, b]) => a <= s && s <= b);
    showTip(
      e.clientX,
      e.clientY,
      `${requestName(one)}\nstep ${session.steps.n[s]}: ${part ? segmentWords(part, s) : one.pre.includes(s) ? "preempted" : "not in this step"}`,
    );
  });
  canvas.addEventListener("mouseleave", hideTip);
  canvas.addEventListener("click", (e) => {
    if (rows[under(e)]) state.request = state.request === under(e) ? null : under(e);
    state.go(state.axis.at(e.offsetX, canvas.clientWidth));
  });
  canvas.dataset.own = "1";
  state.parts.push(() => {
    // brings a request of the step into sight
    const at = rows.findIndex((one) => one.seg.some(([, a, b]) => a <= state.step && state.step <= b)),
      y = at * line;
    if (at >= 0 && state.followed !== state.step && (y < top - line || y > top + view - 3 * line))
      frame.scrollTop = Math.max(0, y - line);
    state.followed = state.step;
    draw();
  });
  return plot(
    many(rows.length, "request"),
    [keyOf("var(--prefill)", "prefill"), keyOf("var(--decode)", "decode"), keyOf("var(--ink)", "preempted")],
    frame,
  );
}
const requestName = (one) =>
  one.id === undefined ? `request ${one.n}` : `request ${one.n} · row ${one.row + 1} · ${one.id}`;
function segmentWords([kind, s0, s1, start, count], s) {
  if (kind === 1) return `computes tokens ${whole(start)} to ${whole(start + count - 1)}`;
  return count === s1 - s0 + 1
    ? `decodes at token ${whole(start + s - s0)}`
    : `decodes (${many(count, "token")} from ${whole(start)} on)`;
}

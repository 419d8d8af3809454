// The scheduler over time: what steps computed, who waited, who ran. One cursor goes through all of it.
const TRACE_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7fd6", "#a8a032"];
const ofRequest = (place) => TRACE_COLOURS[place % TRACE_COLOURS.length];
const STEP_NAMES = ["decode", "prefill", "mixed"],
  STEP_INKS = ["--decode", "--prefill", "--mixed"];

// A canvas that is sharp, painted again when its size, the colours, or what `shows` tells have changed. With `state`
// the cursor lies above it, so that moving it paints nothing. `draw` reads no layout: it is called at every frame.
function surface(height, paint, shows = () => [], state = null) {
  const canvas = el("canvas", {}),
    cursor = state && div("cursor"),
    node = div("surface", canvas, cursor),
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
    const [a, wide] = state.axis.span(state.step, state.step, width, 1);
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
const inkOf = (ink) => el("i", { style: { background: ink }, "aria-hidden": "true" });
const keyOf = (ink, text) => span("lk", inkOf(ink), text);
const hatchKey = (text) => span("lk", el("i", { cls: "hatch", "aria-hidden": "true" }), text);
const plot = (label, keys, node) => div("plot", div("lab", span(null, label), span(null, keys)), node);

// Steps on an axis of time or of steps, from `from` to `to`.
function axisOf(session) {
  const { t, d } = session.steps,
    n = t.length;
  const axis = { by: "steps", n, from: 0, to: n };
  const end = (s) => t[s] + Math.max(d[s], 1),
    whole = () => (axis.by === "steps" ? [0, n] : [t[0], end(n - 1)]),
    left = (s) => (axis.by === "steps" ? s : s < n ? t[s] : end(n - 1)),
    right = (s) => (axis.by === "steps" ? s + 1 : s < n ? end(s) : end(n - 1)),
    px = (v, width) => ((v - axis.from) / (axis.to - axis.from)) * width;
  axis.reset = () => {
    [axis.from, axis.to] = whole();
  };
  axis.x = (s, width) => px(left(s), width); // where a step begins
  // where these steps begin, and how wide they are: at least so wide, with a gap behind them
  axis.span = (first, last, width, least = 0, gap = 0) => {
    const a = px(left(first), width);
    return [a, Math.max(least, px(right(last), width) - a - gap)];
  };
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
  axis.inSight = function* (width) {
    for (let s = axis.at(0, width); s < n && left(s) <= axis.to; s++) yield s;
  };
  axis.zoom = (factor, s) => {
    const [least, most] = whole(),
      middle = (left(s) + right(s)) / 2;
    const span = Math.min(most - least, Math.max((most - least) / Math.max(1, n / 8), (axis.to - axis.from) * factor));
    axis.from = Math.max(least, Math.min(most - span, middle - span / 2));
    axis.to = axis.from + span;
  };
  axis.follow = (s) => {
    // brings a step into sight
    const span = axis.to - axis.from;
    if (left(s) < axis.from || right(s) > axis.to) {
      axis.zoom(1, s);
      axis.to = axis.from + span;
    }
  };
  return axis;
}

// A surface over the axis of a session, with the cursor above it; `more` of what its picture depends on.
function timed(state, height, paint, more = () => []) {
  const shows = () => [state.axis.by, state.axis.from, state.axis.to, ...more()];
  return surface(height, paint, shows, state);
}
function timedPlot(state, name, keys, paint) {
  const { node, draw } = timed(state, 84, paint);
  state.parts.push(draw);
  return plot(name, keys.map(([text, ink]) => keyOf(`var(${ink})`, text)), node);
}
function stepsPlot(session, state) {
  const { tok, k, guess, right } = session.steps,
    most = Math.max(1, ...tok),
    guesses = guess.some(Boolean) ? [["guesses that were right", "--right"], ["wrong", "--wrong"]] : [];
  const paint = (pen, width, height) => {
    for (const s of state.axis.inSight(width)) {
      const tall = Math.max(2, (tok[s] / most) * (height - 4)),
        [a, room] = state.axis.span(s, s, width),
        wide = Math.max(0.7, room - (room > 4 ? 1 : 0)),
        part = tall / Math.max(1, tok[s]);
      pen.fillStyle = colour(STEP_INKS[k[s]]);
      pen.fillRect(a, height - tall, wide, tall);
      guesses.forEach(([, ink], i) => {
        pen.fillStyle = colour(ink);
        pen.fillRect(a, height - tall, wide, part * (i ? guess[s] - right[s] : guess[s]));
      });
    }
  };
  const kinds = STEP_NAMES.map((name, i) => [name, STEP_INKS[i]]);
  return timedPlot(state, `Tokens of each step, up to ${whole(most)}`, [...kinds, ...guesses], paint);
}
function gaugesPlot(session, state) {
  const { run, wait, held, idle } = session.steps,
    pool = Math.max(1, session.pool),
    most = Math.max(1, ...run, ...wait);
  const gauges = [
    ["running", "--decode", run, most],
    ["waiting", "--prefill", wait, most],
    ["pages held", "--right", held, pool],
    ["pages only cached", "--scored", idle, pool],
  ];
  const paint = (pen, width, height) => {
    for (const [, ink, values, top] of gauges) {
      pen.strokeStyle = colour(ink);
      pen.lineWidth = 1.6;
      pen.beginPath();
      for (const s of state.axis.inSight(width)) {
        const y = height - 3 - (values[s] / top) * (height - 8),
          [a, wide] = state.axis.span(s, s, width);
        pen.lineTo(a, y);
        pen.lineTo(a + wide, y);
      }
      pen.stroke();
    }
  };
  const name = `Requests, up to ${whole(most)}, and pages, of ${whole(session.pool)}`;
  return timedPlot(state, name, gauges, paint);
}

// Requests below one another, more than fit: a canvas that stays in sight while its frame scrolls. `paint` draws the
// line of one of them, at this height. `make` makes the surface.
function scroller(rows, line, most, paint, make) {
  const tall = rows.length * line + 4,
    view = Math.min(most, tall),
    props = { cls: "gantt", role: "group", tabindex: "0", "aria-label": `${rows.length} requests over time` },
    frame = el("div", { ...props, style: { height: `${view}px` } });
  let top = 0;
  const inside = (pen, width, height) => {
    const end = Math.min(rows.length, Math.ceil((top + height) / line));
    for (let i = Math.floor(top / line); i < end; i++) paint(pen, width, i, i * line - top + 1);
  };
  const { node, canvas, draw } = make(view - 2, inside, () => [top]);
  frame.append(node, el("div", { style: { height: `${Math.max(0, tall - view - 2)}px` } }));
  const scrolled = () => {
    top = frame.scrollTop;
    draw();
  };
  frame.addEventListener("scroll", scrolled, { passive: true });
  const under = (e) => Math.floor((e.clientY - frame.getBoundingClientRect().top + frame.scrollTop) / line);
  const follow = (i) => {
    const y = i * line;
    if (y < top - line || y > top + view - 3 * line) frame.scrollTop = Math.max(0, y - line);
  };
  return { frame, canvas, draw, under, follow };
}
function ganttPlot(session, state) {
  const rows = session.requests,
    { axis } = state,
    line = rows.length > 400 ? 7 : rows.length > 80 ? 11 : 16,
    tall = line - (line > 8 ? 3 : 1);
  const paint = (pen, width, i, y) => {
    if (i === state.request) {
      pen.fillStyle = colour("--tint");
      pen.fillRect(0, y - 1, width, line);
    }
    for (const [kind, s0, s1] of rows[i].seg) {
      const [a, wide] = axis.span(s0, s1, width, 1, 0.5);
      if (a > width || a + wide < 0) continue;
      pen.fillStyle = colour(kind ? "--prefill" : "--decode");
      pen.fillRect(a, y, wide, tall);
    }
    pen.fillStyle = colour("--ink");
    for (const s of rows[i].pre) pen.fillRect(axis.x(s, width) - 1, y - 1, 2.5, tall + 2);
    if (line >= 11) {
      // whose it is, at the colour of its pages
      pen.fillStyle = ofRequest(i);
      pen.fillRect(Math.max(0, axis.x(rows[i].seg[0]?.[1] ?? 0, width) - 5), y, 3, tall);
    }
  };
  const make = (height, inside, more) => timed(state, height, inside, () => [state.request, ...more()]),
    { frame, canvas, draw, under, follow } = scroller(rows, line, 320, paint, make);
  hover(canvas, (e) => {
    const one = rows[under(e)];
    if (!one) return null;
    const s = axis.at(e.offsetX, canvas.clientWidth),
      part = one.seg.find(([, a, b]) => a <= s && s <= b),
      words = part ? segmentWords(part, s) : one.pre.includes(s) ? "preempted" : "not in this step";
    return `${requestName(one)}\nstep ${session.steps.n[s]}: ${words}`;
  });
  canvas.addEventListener("click", (e) => {
    if (rows[under(e)]) state.request = state.request === under(e) ? null : under(e);
    state.go(axis.at(e.offsetX, canvas.clientWidth));
  });
  canvas.dataset.own = "1";
  state.parts.push(() => {
    // brings a request of the step into sight
    const at = rows.findIndex((one) => one.seg.some(([, a, b]) => a <= state.step && state.step <= b));
    if (at >= 0 && state.followed !== state.step) follow(at);
    state.followed = state.step;
    draw();
  });
  const keys = [keyOf("var(--prefill)", "prefill"), keyOf("var(--decode)", "decode"), keyOf("var(--ink)", "preempted")];
  return plot(many(rows.length, "request"), keys, frame);
}
const requestName = (one) =>
  one.id === undefined ? `request ${one.n}` : `request ${one.n} · row ${one.row + 1} · ${one.id}`;
function segmentWords([kind, s0, s1, start, count], s) {
  if (kind === 1) return `computes tokens ${whole(start)} to ${whole(start + count - 1)}`;
  return count === s1 - s0 + 1
    ? `decodes at token ${whole(start + s - s0)}`
    : `decodes (${many(count, "token")} from ${whole(start)} on)`;
}

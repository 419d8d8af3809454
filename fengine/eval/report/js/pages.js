// Who held which pages, over time and at one step.
function hatched(pen) {
  const tile = el("canvas", { width: 6, height: 6 }),
    ink = tile.getContext("2d");
  ink.strokeStyle = colour("--card");
  ink.lineWidth = 1.4;
  ink.beginPath();
  for (const k of [-6, 0, 6]) {
    ink.moveTo(k, 6);
    ink.lineTo(k + 6, 0);
  }
  ink.stroke();
  return pen.createPattern(tile, "repeat");
}
const highestPage = (session) => session.holds.reduce((most, [page, count]) => Math.max(most, page + count), 1);

function pagesPlot(session, state) {
  const high = highestPage(session),
    tall = Math.max(90, Math.min(320, high * 6)),
    dim = (place) => state.request !== null && state.request !== place;
  const { node, canvas, draw } = surface(
    tall,
    (pen, width, height) => {
      const { axis } = state,
        unit = height / high,
        pattern = hatched(pen);
      pen.fillStyle = colour("--sunk");
      pen.fillRect(0, 0, width, height);
      for (const [page, count, s0, s1, place, hit] of session.holds) {
        const a = axis.px(axis.left(s0), width),
          b = axis.px(axis.left(s1), width);
        if (b < 0 || a > width) continue;
        const box = [a, (page - 1) * unit, Math.max(0.8, b - a), Math.max(0.8, count * unit - (unit > 4 ? 1 : 0))];
        pen.globalAlpha = dim(place) ? 0.18 : 0.92;
        if (!hit) {
          pen.fillStyle = ofRequest(place);
          pen.fillRect(...box);
        }
        if (hit) {
          pen.fillStyle = ofRequest(place);
          pen.globalAlpha *= 0.5;
          pen.fillRect(...box);
          pen.globalAlpha = dim(place) ? 0.2 : 1;
          pen.fillStyle = pattern;
          pen.fillRect(...box);
        }
      }
    },
    () => [...shown(state), state.request],
    state,
  );
  canvas.addEventListener("mousemove", (e) => {
    const s = state.axis.at(e.offsetX, canvas.clientWidth),
      page = 1 + Math.floor((e.offsetY / canvas.clientHeight) * high);
    const those = session.holds.filter(([p, c, a, b]) => p <= page && page < p + c && a <= s && s < b);
    showTip(
      e.clientX,
      e.clientY,
      `page ${page}, step ${session.steps.n[s]}\n${those.length ? those.map(([, , , , place, hit]) => `${requestName(session.requests[place])}${hit ? " (prefix hit)" : ""}`).join("\n") : "held by nobody"}`,
    );
  });
  canvas.addEventListener("mouseleave", hideTip);
  state.parts.push(draw);
  return plot(
    `Pages 1 to ${whole(high - 1)} of ${whole(session.pool)}, in the colour of who holds them`,
    el(
      "span",
      { cls: "lk" },
      el("i", { cls: "hatch", "aria-hidden": "true" }),
      "prefix hit: shared or found in the cache",
    ),
    node,
  );
}

function poolMap(session, state) {
  // every page of the pool that was ever held, at the cursor
  const high = highestPage(session) - 1;
  const shape = (width) => {
    const cell = Math.max(3, Math.min(18, Math.floor(Math.sqrt((width * 190) / Math.max(1, high)))));
    return [cell, Math.max(1, Math.floor(width / cell))];
  };
  const { node, draw } = surface(
    (width) => {
      const [cell, across] = shape(width);
      return Math.ceil(high / across) * cell + 2;
    },
    (pen, width) => {
      const [cell, across] = shape(width),
        s = state.step;
      const holders = new Map();
      for (const [page, count, a, b, place] of session.holds)
        if (a <= s && s < b)
          for (let p = page; p < page + count; p++) holders.set(p, [...(holders.get(p) || []), place]);
      const pattern = hatched(pen),
        free = colour("--sunk");
      for (let p = 1; p <= high; p++) {
        const x = ((p - 1) % across) * cell,
          y = Math.floor((p - 1) / across) * cell,
          those = holders.get(p);
        pen.globalAlpha = those && state.request !== null && !those.includes(state.request) ? 0.2 : 1;
        pen.fillStyle = those ? ofRequest(those[0]) : free;
        pen.fillRect(x, y, cell - 1, cell - 1);
        if (those?.length > 1) {
          pen.fillStyle = pattern;
          pen.fillRect(x, y, cell - 1, cell - 1);
        }
      }
    },
    () => [state.step, state.request],
  );
  state.parts.push(draw);
  return plot(
    "The pool at this step",
    el("span", { cls: "lk" }, el("i", { cls: "hatch", "aria-hidden": "true" }), "held by several"),
    node,
  );
}

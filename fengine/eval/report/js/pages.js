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
    { axis } = state;
  const paint = (pen, width, height) => {
    const unit = height / high,
      pattern = hatched(pen);
    pen.fillStyle = colour("--sunk");
    pen.fillRect(0, 0, width, height);
    for (const [page, count, s0, s1, place, hit] of session.holds) {
      const a = axis.x(s0, width),
        b = axis.x(s1, width),
        dim = state.request !== null && state.request !== place;
      if (b < 0 || a > width) continue;
      const box = [a, (page - 1) * unit, Math.max(0.8, b - a), Math.max(0.8, count * unit - (unit > 4 ? 1 : 0))];
      pen.globalAlpha = (dim ? 0.18 : 0.92) * (hit ? 0.5 : 1);
      pen.fillStyle = ofRequest(place);
      pen.fillRect(...box);
      if (!hit) continue;
      pen.globalAlpha = dim ? 0.2 : 1;
      pen.fillStyle = pattern;
      pen.fillRect(...box);
    }
  };
  const { node, canvas, draw } = timed(state, tall, paint, () => [state.request]);
  hover(canvas, (e) => {
    const s = axis.at(e.offsetX, canvas.clientWidth),
      page = 1 + Math.floor((e.offsetY / canvas.clientHeight) * high);
    const those = session.holds
      .filter(([p, c, a, b]) => p <= page && page < p + c && a <= s && s < b)
      .map(([, , , , place, hit]) => `${requestName(session.requests[place])}${hit ? " (prefix hit)" : ""}`);
    return `page ${page}, step ${session.steps.n[s]}\n${those.join("\n") || "held by nobody"}`;
  });
  state.parts.push(draw);
  return plot(
    `Pages 1 to ${whole(high - 1)} of ${whole(session.pool)}, in the colour of who holds them`,
    hatchKey("prefix hit: shared or found in the cache"),
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
  const tall = (width) => {
    const [cell, across] = shape(width);
    return Math.ceil(high / across) * cell + 2;
  };
  const paint = (pen, width) => {
    const [cell, across] = shape(width),
      s = state.step,
      holders = new Map(),
      pattern = hatched(pen);
    for (const [page, count, a, b, place] of session.holds)
      if (a <= s && s < b)
        for (let p = page; p < page + count; p++) holders.set(p, [...(holders.get(p) || []), place]);
    for (let p = 1; p <= high; p++) {
      const box = [((p - 1) % across) * cell, Math.floor((p - 1) / across) * cell, cell - 1, cell - 1],
        those = holders.get(p);
      pen.globalAlpha = those && state.request !== null && !those.includes(state.request) ? 0.2 : 1;
      pen.fillStyle = those ? ofRequest(those[0]) : colour("--sunk");
      pen.fillRect(...box);
      if (!(those?.length > 1)) continue;
      pen.fillStyle = pattern;
      pen.fillRect(...box);
    }
  };
  const { node, draw } = surface(tall, paint, () => [state.step, state.request]);
  state.parts.push(draw);
  return plot("The pool at this step", hatchKey("held by several"), node);
}

// Plots in SVG: intervals on a common axis, lines, and histograms.
function ticksOf(low, high, most = 5) {
  const span = high - low || 1,
    raw = span / most,
    power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
  const found = [];
  for (let x = Math.ceil(low / step - 1e-9) * step; x <= high + step * 1e-6; x += step)
    found.push(Math.abs(x) < step * 1e-6 ? 0 : x);
  return [found, Math.max(0, -Math.floor(Math.log10(step) + 1e-9))];
}

// The ends of an axis, a little beyond the values; the range of shares is left only where a value does.
function endsOf(values) {
  const low = Math.min(...values),
    high = Math.max(...values),
    pad = (high - low || Math.abs(high) || 1) * 0.08,
    shares = values.every((v) => v >= 0 && v <= 1);
  return shares ? [Math.max(0, low - pad), Math.min(1, high + pad)] : [low - pad, high + pad];
}
const sketch = (width, height, describe) =>
  svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": describe });
const stroke = (x1, y1, x2, y2, props) => svg("line", { x1, x2, y1, y2, ...props });
const label = (x, y, anchor, text, cls) => svg("text", { x, y, "text-anchor": anchor, class: cls }, text);

// series: {label, ink, points: [{x, value, low, high}]}. A line each, with the band of its intervals.
function lines(series, { width, height = 260, name, describe }) {
  const all = series.flatMap((s) => s.points),
    xs = all.map((p) => p.x),
    [low, high] = endsOf(all.flatMap((p) => [p.low ?? p.value, p.high ?? p.value])),
    [first, last] = [Math.min(...xs), Math.max(...xs)],
    [left, right, top, bottom] = [52, 18, 10, height - 40],
    [ticks, digits] = ticksOf(low, high, 4);
  const x = (v) => left + ((v - first) / (last - first || 1)) * (width - left - right),
    y = (v) => bottom - ((v - low) / (high - low || 1)) * (bottom - top),
    path = (points, of) => points.map((p) => `${x(p.x).toFixed(1)},${y(of(p)).toFixed(1)}`).join(" ");
  const picture = sketch(width, height, describe);
  for (const t of ticks)
    picture.append(
      stroke(left, y(t), width - right, y(t), { class: "axis" }),
      label(left - 8, y(t) + 4, "end", fixed(t, digits)),
    );
  for (const v of [...new Set(xs)].sort((a, b) => a - b))
    picture.append(label(x(v), bottom + 18, "middle", String(v)));
  picture.append(label((left + width - right) / 2, height - 4, "middle", name));
  for (const s of series) {
    const known = s.points.filter((p) => isNumber(p.low) && isNumber(p.high)),
      band = `${path(known, (p) => p.high)} ${path(known.slice().reverse(), (p) => p.low)}`,
      line = path(s.points, (p) => p.value);
    picture.append(
      svg("polygon", { points: band, fill: s.ink, opacity: 0.14 }),
      svg("polyline", { points: line, fill: "none", stroke: s.ink, "stroke-width": 2 }),
    );
    for (const p of s.points) {
      const title = svg("title", {}, `${s.label || name} ${p.x}: ${p.figure}`);
      picture.append(svg("circle", { cx: x(p.x), cy: y(p.value), r: 4, fill: s.ink }, title));
    }
  }
  return picture;
}

// rows: {label, value, low, high, ink, hollow, figure, title}. Each a dot with its interval; `zero`: no difference.
function intervals(rows, { zero = null, width, describe }) {
  const good = rows.filter((r) => isNumber(r.value));
  if (!good.length) return hint("No figures.");
  const ends = good.flatMap((r) => [r.low ?? r.value, r.high ?? r.value]).concat(zero === null ? [] : [zero]),
    [low, high] = endsOf(ends),
    longest = Math.max(...rows.map((r) => Math.min(46, r.label.length)));
  const wide = width < 460 ? 0 : Math.min(Math.max(90, 7.2 * longest + 16), width * 0.4),
    left = wide || 8,
    right = 136,
    line = wide ? 30 : 44,
    top = 6,
    room = wide ? Math.floor((wide - 12) / 6.6) : 44,
    bottom = top + rows.length * line,
    [ticks, digits] = ticksOf(low, high, wide ? 5 : 3);
  const x = (v) => left + ((v - low) / (high - low)) * (width - left - right);
  const picture = sketch(width, bottom + 24, describe);
  for (const t of ticks)
    picture.append(
      stroke(x(t), top, x(t), bottom, { class: "axis" }),
      label(Math.max(16, x(t)), bottom + 16, "middle", fixed(t, digits)),
    );
  if (zero !== null) picture.append(stroke(x(zero), top, x(zero), bottom, { class: "zero" }));
  rows.forEach((r, i) => {
    const y = top + i * line + (wide ? line / 2 : line - 14),
      ink = r.ink || "var(--accent)",
      name = r.label.length > room ? `${r.label.slice(0, room - 1)}…` : r.label;
    const group = svg("g", {}, svg("title", {}, `${r.label}: ${r.title || ""}`));
    group.append(wide ? label(left - 12, y + 4, "end", name, "ink") : label(8, y - 12, null, name, "ink"));
    if (isNumber(r.value) && isNumber(r.low) && isNumber(r.high)) {
      const bar = { stroke: ink, "stroke-width": 2.5, "stroke-linecap": "round", opacity: 0.55 };
      group.append(stroke(x(r.low), y, x(r.high), y, bar));
      for (const end of [r.low, r.high])
        group.append(stroke(x(end), y - 4, x(end), y + 4, { stroke: ink, "stroke-width": 1.5 }));
    }
    if (isNumber(r.value)) {
      const dot = { r: 4.5, fill: r.hollow ? "var(--card)" : ink, stroke: ink, "stroke-width": 2 };
      group.append(svg("circle", { cx: x(r.value), cy: y, ...dot }));
      group.append(label(width - right + 12, y + 4, null, r.figure || short(r.value)));
    } else group.append(label(left + 4, y + 4, null, r.title || "no figure"));
    picture.append(group);
  });
  return picture;
}

// bins: [label, count]. Heights are square roots.
function histogram(bins, { width, height = 190, describe }) {
  const most = Math.max(1, ...bins.map(([, n]) => n)),
    base = height - 34,
    step = (width - 16) / bins.length;
  const scale = (n) => (n ? Math.max(2, (Math.sqrt(n) / Math.sqrt(most)) * (base - 22)) : 0);
  const picture = sketch(width, height, describe);
  bins.forEach(([name, n], i) => {
    const x = 8 + i * step,
      tall = scale(n),
      box = { x: x + 2, y: base - tall, width: Math.max(1, step - 4), height: tall, rx: 3, fill: "var(--accent)" };
    const parts = [svg("title", {}, `${name}: ${whole(n)}`), svg("rect", box)];
    if (n > 0) parts.push(label(x + step / 2, base - tall - 6, "middle", whole(n), "ink"));
    picture.append(svg("g", {}, parts, label(x + step / 2, base + 17, "middle", name)));
  });
  picture.append(stroke(4, base + 0.5, width - 4, base + 0.5, { class: "axis" }));
  return picture;
}

// A place whose picture is made anew when its width changes.
function fluid(make, most = 1240) {
  const box = div("fluid");
  let last = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.min(most, Math.floor(entry.contentRect.width));
    if (width > 40 && width !== last) {
      last = width;
      box.replaceChildren(make(width));
    }
  }).observe(box);
  return box;
}

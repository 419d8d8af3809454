// Plots in SVG: intervals on a common axis, and histograms.
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

// The ends of an axis, which leaves the range of shares only where a value does.
function within(values, low, high) {
  return values.every((v) => v >= 0 && v <= 1) ? [Math.max(0, low), Math.min(1, high)] : [low, high];
}

// series: {label, ink, points: [{x, value, low, high}]}. A line each, with the band of its intervals.
function lines(series, { width = 640, height = 260, name = "", describe = "" } = {}) {
  const all = series.flatMap((s) => s.points),
    xs = all.map((p) => p.x),
    ends = all.flatMap((p) => [p.low ?? p.value, p.high ?? p.value]);
  let [low, high] = [Math.min(...ends), Math.max(...ends)];
  const pad = (high - low || Math.abs(high) || 1) * 0.08,
    [first, last] = [Math.min(...xs), Math.max(...xs)];
  [low, high] = within(ends, low - pad, high + pad);
  const [left, right, top, bottom] = [52, 18, 10, height - 40],
    [ticks, digits] = ticksOf(low, high, 4);
  const x = (v) => left + ((v - first) / (last - first || 1)) * (width - left - right),
    y = (v) => bottom - ((v - low) / (high - low || 1)) * (bottom - top),
    path = (points, of) => points.map((p) => `${x(p.x).toFixed(1)},${y(of(p)).toFixed(1)}`).join(" ");
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": describe });
  for (const t of ticks) {
    picture.append(svg("line", { x1: left, x2: width - right, y1: y(t), y2: y(t), class: "axis" }));
    picture.append(svg("text", { x: left - 8, y: y(t) + 4, "text-anchor": "end" }, fixed(t, digits)));
  }
  for (const v of [...new Set(xs)].sort((a, b) => a - b))
    picture.append(svg("text", { x: x(v), y: bottom + 18, "text-anchor": "middle" }, String(v)));
  picture.append(svg("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, name));
  for (const s of series) {
    const known = s.points.filter((p) => isNumber(p.low) && isNumber(p.high)),
      band = `${path(known, (p) => p.high)} ${path(known.slice().reverse(), (p) => p.low)}`;
    picture.append(svg("polygon", { points: band, fill: s.ink, opacity: 0.14 }));
    picture.append(
      svg("polyline", { points: path(s.points, (p) => p.value), fill: "none", stroke: s.ink, "stroke-width": 2 }),
    );
    for (const p of s.points)
      picture.append(
        svg(
          "circle",
          { cx: x(p.x), cy: y(p.value), r: 4, fill: s.ink },
          svg("title", {}, `${s.label || name} ${p.x}: ${p.figure}`),
        ),
      );
  }
  return picture;
}

// rows: {label, value, low, high, kind, title}. Each a dot with its interval; `zero`: where there is no difference.
function intervals(rows, { zero = null, width = 640, describe = "" } = {}) {
  const good = rows.filter((r) => isNumber(r.value));
  if (!good.length) return el("p", { cls: "muted small" }, "No figures.");
  const ends = good.flatMap((r) => [r.low ?? r.value, r.high ?? r.value]).concat(zero === null ? [] : [zero]);
  let low = Math.min(...ends),
    high = Math.max(...ends);
  const pad = (high - low || Math.abs(high) || 1) * 0.08;
  [low, high] = within(ends, low - pad, high + pad);
  const wide =
      width < 460
        ? 0
        : Math.min(Math.max(90, 7.2 * Math.max(...rows.map((r) => Math.min(46, r.label.length))) + 16), width * 0.4),
    left = wide || 8,
    right = 136,
    line = wide ? 30 : 44,
    top = 6;
  const x = (v) => left + ((v - low) / (high - low)) * (width - left - right);
  const bottom = top + rows.length * line,
    [ticks, digits] = ticksOf(low, high, wide ? 5 : 3);
  const picture = svg("svg", {
    viewBox: `0 0 ${width} ${bottom + 24}`,
    width,
    height: bottom + 24,
    role: "img",
    "aria-label": describe,
  });
  for (const t of ticks) {
    picture.append(svg("line", { x1: x(t), x2: x(t), y1: top, y2: bottom, class: "axis" }));
    picture.append(svg("text", { x: Math.max(16, x(t)), y: bottom + 16, "text-anchor": "middle" }, fixed(t, digits)));
  }
  if (zero !== null) picture.append(svg("line", { x1: x(zero), x2: x(zero), y1: top, y2: bottom, class: "zero" }));
  rows.forEach((r, i) => {
    const y = top + i * line + (wide ? line / 2 : line - 14),
      ink = r.ink || "var(--accent)",
      room = wide ? Math.floor((wide - 12) / 6.6) : 44;
    const label = r.label.length > room ? `${r.label.slice(0, room - 1)}…` : r.label;
    const group = svg("g", {}, svg("title", {}, `${r.label}: ${r.title || ""}`));
    group.append(
      wide
        ? svg("text", { x: left - 12, y: y + 4, "text-anchor": "end", class: "ink" }, label)
        : svg("text", { x: 8, y: y - 12, class: "ink" }, label),
    );
    if (isNumber(r.value)) {
      if (isNumber(r.low) && isNumber(r.high)) {
        group.append(
          svg("line", {
            x1: x(r.low),
            x2: x(r.high),
            y1: y,
            y2: y,
            stroke: ink,
            "stroke-width": 2.5,
            "stroke-linecap": "round",
            opacity: 0.55,
          }),
        );
        for (const end of [r.low, r.high])
          group.append(svg("line", { x1: x(end), x2: x(end), y1: y - 4, y2: y + 4, stroke: ink, "stroke-width": 1.5 }));
      }
      group.append(
        svg("circle", {
          cx: x(r.value),
          cy: y,
          r: 4.5,
          fill: r.hollow ? "var(--card)" : ink,
          stroke: ink,
          "stroke-width": 2,
        }),
      );
      group.append(svg("text", { x: width - right + 12, y: y + 4 }, r.figure || short(r.value)));
    } else group.append(svg("text", { x: left + 4, y: y + 4 }, r.title || "no figure"));
    picture.append(group);
  });
  return picture;
}

// bins: [label, count]
function histogram(bins, { width = 640, height = 190, describe = "" } = {}) {
  const most = Math.max(1, ...bins.map(([, n]) => n)),
    base = height - 34,
    step = (width - 16) / bins.length;
  const scale = (n) => (n ? Math.max(2, (Math.sqrt(n) / Math.sqrt(most)) * (base - 22)) : 0);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": describe });
  bins.forEach(([label, n], i) => {
    const x = 8 + i * step,
      tall = scale(n);
    picture.append(
      svg(
        "g",
        {},
        svg("title", {}, `${label}: ${whole(n)}`),
        svg("rect", {
          x: x + 2,
          y: base - tall,
          width: Math.max(1, step - 4),
          height: tall,
          rx: 3,
          fill: "var(--accent)",
        }),
        n > 0 && svg("text", { x: x + step / 2, y: base - tall - 6, "text-anchor": "middle", class: "ink" }, whole(n)),
        svg("text", { x: x + step / 2, y: base + 17, "text-anchor": "middle" }, label),
      ),
    );
  });
  picture.append(svg("line", { x1: 4, x2: width - 4, y1: base + 0.5, y2: base + 0.5, class: "axis" }));
  return picture;
}

// A place whose picture is made anew when its width changes.
function fluid(make, most = 1240) {
  const box = el("div", { cls: "fluid" });
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

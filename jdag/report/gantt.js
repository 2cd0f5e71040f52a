// Draws the chart of `jdag.report.gantt`: zoom by wheel or buttons, drag to move; the
// action under the pointer is told below.
(() => {
  const chart = JSON.parse(document.getElementById("gantt-data").textContent);
  const canvas = document.getElementById("gantt"), told = document.getElementById("gantt-told");
  const LEFT = 110, ROW = 30, BAR = 22, FOOT = 34, FONT = "system-ui, sans-serif", whole = chart.length_ns || 1;
  const hint = "Point at a bar; zoom with the wheel or the buttons, drag to move.";
  let from = 0, to = whole, drag = null, scale = 1;

  const time = ns => {
    for (const [size, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]])
      if (Math.abs(ns) >= size) return `${+(ns / size).toPrecision(6)} ${unit}`;
    return `${ns} ns`;
  };
  const place = ns => LEFT + (ns - from) / (to - from) * (canvas.clientWidth - LEFT - 8);
  const moment = x => from + (x - LEFT) / (canvas.clientWidth - LEFT - 8) * (to - from);

  function step() {  // A round step of the axis, for eight ticks or fewer.
    const least = (to - from) / 8, power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
    return [1, 2, 5, 10].map(n => n * power).find(n => n >= least);
  }

  function draw() {
    const width = canvas.clientWidth, height = chart.workers.length * ROW + FOOT;
    scale = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = width * scale; canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.textBaseline = "middle";
    chart.workers.forEach((worker, row) => {
      const y = row * ROW + 4;
      pen.font = `12px ${FONT}`;
      pen.fillStyle = "#22272c"; pen.textAlign = "right";
      let name = worker;
      while (pen.measureText(name).width > LEFT - 16) name = `${name.slice(0, -2)}…`;
      pen.fillText(name, LEFT - 8, y + BAR / 2);
      pen.strokeStyle = "#e1e5e9"; pen.strokeRect(LEFT - 0.5, y - 0.5, width - LEFT - 7, BAR + 1);
      pen.save(); pen.beginPath(); pen.rect(LEFT, y, width - LEFT - 8, BAR); pen.clip();
      pen.textAlign = "center";
      for (const [start, end, ...parts] of chart.bars[row]) {
        if (end < from || start > to) continue;
        const x = place(start), w = Math.max(place(end) - x, 0.5), h = BAR / parts.length;
        const seen = Math.max(x, LEFT), shown = Math.min(x + w, width - 8) - seen;
        pen.font = `${parts.length > 1 ? 9 : 12}px ${FONT}`;
        parts.forEach(([, kind, batch], part) => {
          const top = y + part * h;
          pen.fillStyle = chart.kinds[kind][1]; pen.fillRect(x, top, w, h);
          if (w > 3) { pen.strokeStyle = "white"; pen.strokeRect(x + 0.5, top + 0.5, w - 1, h - 1); }
          if (shown > 8 + 7 * `${batch}`.length) { pen.fillStyle = "white"; pen.fillText(batch, seen + shown / 2, top + h / 2 + 1); }
        });
      }
      pen.restore();
    });
    pen.font = `12px ${FONT}`;
    pen.fillStyle = "#68727c"; pen.strokeStyle = "#c5ccd3"; pen.textAlign = "center";
    const y = chart.workers.length * ROW + 4;
    for (let ns = Math.ceil(from / step()) * step(); ns <= to; ns += step()) {
      pen.beginPath(); pen.moveTo(place(ns), y); pen.lineTo(place(ns), y + 5); pen.stroke();
      const half = pen.measureText(time(ns)).width / 2;
      pen.fillText(time(ns), Math.min(place(ns), width - half - 1), y + 17);
    }
  }

  function look(center, factor) {
    const width = Math.min(Math.max((to - from) * factor, Math.min(10, whole)), whole);
    const share = (center - from) / (to - from);
    from = Math.min(Math.max(center - share * width, 0), whole - width);
    to = from + width;
    draw();
  }

  function point(event) {
    const box = canvas.getBoundingClientRect();
    const ns = moment(event.clientX - box.left), row = Math.floor((event.clientY - box.top) / ROW);
    const bar = (chart.bars[row] || []).find(([start, end]) => start <= ns && ns < end);
    const said = ([stage, kind, batch]) =>
      `${stage}${kind}${batch}: ${chart.kinds[kind][0]} of stage ${stage}, micro-batch ${batch}`;
    told.textContent = !bar || event.clientX - box.left < LEFT ? hint
      : `${bar.slice(2).map(said).join("; with it ")}; on ${chart.workers[row]}, from ${time(bar[0])}, for ${time(bar[1] - bar[0])}`;
  }

  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    look(moment(event.clientX - canvas.getBoundingClientRect().left), event.deltaY < 0 ? 0.8 : 1.25);
  }, { passive: false });
  canvas.addEventListener("pointerdown", event => { drag = event.clientX; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointermove", event => {
    if (drag !== null) {
      const by = moment(drag) - moment(event.clientX), width = to - from;
      from = Math.min(Math.max(from + by, 0), whole - width); to = from + width;
      drag = event.clientX;
      draw();
    }
    point(event);
  });
  for (const [id, factor] of [["gantt-in", 0.5], ["gantt-out", 2], ["gantt-all", Infinity]])
    document.getElementById(id).addEventListener("click", () => look((from + to) / 2, factor));
  window.addEventListener("resize", draw);
  told.textContent = hint;
  draw();
})();

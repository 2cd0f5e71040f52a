// Draws the chart of `jdag.report.gantt`. Wheel and buttons zoom, dragging moves; the
// text below the chart describes the bar under the pointer.
(() => {
  const chart = JSON.parse(document.getElementById("gantt-data").textContent);
  const canvas = document.getElementById("gantt"), text = document.getElementById("gantt-text");
  const rows = chart.rows, whole = chart.length_ns || 1, FONT = "system-ui, sans-serif";
  const LEFT = 110, RIGHT = chart.is_dense ? 8 : 84, FOOT = 52;
  const ROW = chart.is_dense ? Math.max(2, Math.min(14, Math.floor(900 / rows.length))) : 46;
  const hint = "Point at a bar to see its details. Zoom with the wheel or the buttons; drag to move.";
  let from = 0, to = whole, drag = null;

  const time = ns => {
    for (const [size, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "us"]])
      if (Math.abs(ns) >= size) return `${+(ns / size).toPrecision(6)} ${unit}`;
    return `${ns} ns`;
  };
  const inner = () => canvas.clientWidth - LEFT - RIGHT;
  const place = ns => LEFT + (ns - from) / (to - from) * inner();
  const moment = x => from + (x - LEFT) / inner() * (to - from);

  function step() {  // The step between ticks of the axis: at most eight, at round numbers.
    const least = (to - from) / 8, power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
    return [1, 2, 5, 10].map(n => n * power).find(n => n >= least);
  }

  function fitted(pen, text, room) {  // The text, truncated to `room` pixels.
    if (room < 10) return "";
    if (pen.measureText(text).width <= room) return text;
    const most = Math.floor(text.length * room / pen.measureText(text).width) - 1;
    return most < 4 ? "" : `${text.slice(0, most)}…`;
  }

  function drawRow(pen, row, top) {
    pen.fillStyle = chart.idle; pen.fillRect(LEFT, top, inner(), ROW - (chart.is_dense ? 0 : 3));
    pen.save(); pen.beginPath(); pen.rect(LEFT, top, inner(), ROW); pen.clip();
    pen.textAlign = "center";
    for (const [start, end, kind, lane, label] of row.bars) {
      if (end < from || start > to) continue;
      const x = place(start), w = place(end) - x;
      const y = top + chart.lanes[lane][0] * ROW, h = chart.lanes[lane][1] * ROW;
      pen.fillStyle = chart.kinds[kind][1]; pen.fillRect(x, y, chart.is_dense && w > 1 ? w + 0.5 : w, h);
      if (w > 3 && !chart.is_dense) { pen.strokeStyle = "white"; pen.strokeRect(x, y, w, h); }
      if (!label || w < 10 || h < 10) continue;
      const seen = Math.max(x, LEFT), room = Math.min(x + w, LEFT + inner()) - seen;
      pen.font = `${h > 16 ? 12 : 10}px ${FONT}`;
      pen.fillStyle = "white"; pen.fillText(fitted(pen, label, room - 4), seen + room / 2, y + h / 2 + 1);
    }
    pen.fillStyle = "#22272c"; pen.font = `bold 14px ${FONT}`;
    for (const [at, kind] of row.marks) pen.fillText(kind === "crash" ? "✖" : "×", place(at), top + 0.8 * ROW);
    pen.restore();
  }

  function draw() {
    const width = canvas.clientWidth, height = rows.length * ROW + FOOT;
    const scale = window.devicePixelRatio || 1, every = Math.ceil(14 / ROW);
    canvas.style.height = `${height}px`;
    canvas.width = width * scale; canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.textBaseline = "middle";
    rows.forEach((row, number) => {
      const top = number * ROW;
      drawRow(pen, row, top);
      pen.font = `${chart.is_dense ? 10 : 13}px ${FONT}`; pen.fillStyle = "#22272c"; pen.textAlign = "right";
      if (number % every === 0) pen.fillText(fitted(pen, row.worker, LEFT - 16), LEFT - 8, top + ROW / 2);
      pen.font = `12px ${FONT}`; pen.fillStyle = "#68727c"; pen.textAlign = "left";
      if (!chart.is_dense) pen.fillText(row.busy, LEFT + inner() + 8, top + ROW / 2);
    });
    pen.font = `12px ${FONT}`;
    pen.fillStyle = "#68727c"; pen.strokeStyle = "#c5ccd3"; pen.textAlign = "center";
    const y = rows.length * ROW;
    for (let ns = Math.ceil(from / step()) * step(); ns <= to; ns += step()) {
      pen.beginPath(); pen.moveTo(place(ns), y); pen.lineTo(place(ns), y + 5); pen.stroke();
      pen.fillText(time(ns), place(ns), y + 17);
    }
    pen.fillText(chart.axis, LEFT + inner() / 2, y + 40);
  }

  function look(start, width) {
    width = Math.min(Math.max(width, Math.min(10, whole)), whole);
    from = Math.min(Math.max(start, 0), whole - width);
    to = from + width;
    draw();
  }
  const zoom = (center, factor) => look(center - (center - from) * factor, (to - from) * factor);

  function point(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left;
    const ns = moment(x), y = (event.clientY - box.top) / ROW, row = rows[Math.floor(y)];
    const within = ([start, end, , lane]) => {
      const [top, height] = chart.lanes[lane];
      return start <= ns && ns < end && top <= y % 1 && y % 1 < top + height;
    };
    const bar = row && x >= LEFT && row.bars.findLast(within);
    text.textContent = !bar ? hint
      : `${chart.texts[bar[5]].replaceAll("{}", bar[4])}; on ${row.worker}, from ${time(bar[0])}, for ${time(bar[1] - bar[0])}`;
  }

  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    zoom(moment(event.clientX - canvas.getBoundingClientRect().left), event.deltaY < 0 ? 0.8 : 1.25);
  }, { passive: false });
  canvas.addEventListener("pointerdown", event => { drag = event.clientX; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointermove", event => {
    if (drag !== null) {
      look(from + moment(drag) - moment(event.clientX), to - from);
      drag = event.clientX;
    }
    point(event);
  });
  for (const [id, factor] of [["gantt-in", 0.5], ["gantt-out", 2]])
    document.getElementById(id).addEventListener("click", () => zoom((from + to) / 2, factor));
  document.getElementById("gantt-all").addEventListener("click", () => look(0, whole));
  window.addEventListener("resize", draw);
  text.textContent = hint;
  draw();
})();

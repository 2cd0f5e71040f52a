"""Draws the pictures of these pages as SVG: `python docs/internals/pictures.py`.

Inputs:  the contracts of import-linter in pyproject.toml, first lines of packages, and
         the messages below.
Outputs: docs/_static/architecture.svg, life-of-a-pass.svg, life-of-a-step.svg.

Pages include the text of a picture, so its colours are those of the page, light or
dark. Elsewhere the colours follow the system.
"""

import ast
import tomllib
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from textwrap import wrap

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STATIC = HERE.parent / "_static"

STYLE = """
.jd { --fg: var(--color-foreground-primary, #1f2328); font: 13px system-ui, sans-serif;
  --soft: var(--color-foreground-secondary, #59636e); width: 100%; height: auto;
  --page: var(--color-background-primary, #ffffff); }
@media (prefers-color-scheme: dark) {
  .jd { --fg: var(--color-foreground-primary, #e6edf3);
    --soft: var(--color-foreground-secondary, #9da7b3);
    --page: var(--color-background-primary, #131416); } }
.jd text { fill: var(--fg); } .jd .soft { fill: var(--soft); font-size: 12px; }
.jd .bold { font-weight: 600; } .jd .mid { text-anchor: middle; }
.jd .end { text-anchor: end; } .jd .mono { font: 12px ui-monospace, monospace; }
.jd .box { fill: var(--page); stroke: var(--soft); }
.jd .line { stroke: var(--soft); fill: none; } .jd .dash { stroke-dasharray: 5 4; }
.jd .band { fill: #7f8ea3; opacity: 0.13; } .jd .band2 { fill: #7f8ea3; opacity: 0.05; }
.jd .halo { stroke: var(--page); stroke-width: 4px; paint-order: stroke; }
.jd .go { stroke: #3b82f6; fill: none; stroke-width: 1.6; }
.jd .gohead { fill: #3b82f6; }
.jd .back { stroke: #e8833a; fill: none; stroke-width: 1.6; }
.jd .backhead { fill: #e8833a; } .jd .head { fill: var(--soft); }
"""


def text(x: float, y: float, content: str, kind: str = "") -> str:
    """Return a text at a point. `kind` is its class in `STYLE`."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(content)}</text>'


def rect(x: float, y: float, w: float, h: float, kind: str, r: float = 5) -> str:
    """Return a rectangle with round corners."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r:g}" '
        f'class="{kind}"/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, kind: str = "line") -> str:
    """Draw a horizontal or vertical arrow. Its head has the colour of its kind."""
    head = {"go": "gohead", "back": "backhead"}.get(kind, "head")
    dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    bx, by = x2 - 9 * dx, y2 - 9 * dy
    corners = (x2, y2), (bx - 4 * dy, by - 4 * dx), (bx + 4 * dy, by + 4 * dx)
    points = " ".join([f"{x:g},{y:g}" for x, y in corners])
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{bx:g}" y2="{by:g}" class="{kind}"/>'
        f'<polygon points="{points}" class="{head}"/>'
    )


def write(name: str, title: str, w: float, h: float, parts: list[str]) -> None:
    """Write a picture of this size."""
    body = "\n".join(parts)
    (STATIC / f"{name}.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="jd" role="img" '
        f'viewBox="0 0 {w:g} {h:g}" style="max-width: {w:g}px">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


# ------------------------------------------------------------------------ architecture


def purpose(package: str) -> str:
    """Return the first sentence of a package, without its own name."""
    path = ROOT / "jdag" / package
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = " ".join(doc.split("\n\n")[0].split()).rstrip(".").replace("`", "")
    name, _, rest = line.partition(": ")
    if rest and len(name.split()) < 3:
        return rest[0].upper() + rest[1:]
    return line


def room(
    parts: list[str], name: str, x: float, y: float, size: tuple[float, float]
) -> None:
    """Draw a room. A room that has its floor to itself has its purpose beside it."""
    w, h = size
    is_folder = (ROOT / "jdag" / name).is_dir()
    parts.append(rect(x, y, w, h, "box"))
    parts.append(text(x + 10, y + 20, f"{name}/" if is_folder else name, "bold"))
    is_alone = w > WIDTH / 2
    begin = (x + 102, y + 20) if is_alone else (x + 10, y + 37)
    for number, line in enumerate(wrap(purpose(name), ALONE if is_alone else PAIRED)):
        parts.append(text(begin[0], begin[1] + 15 * number, line, "soft"))


RULE = (
    "A room may import every room on a lower floor. "
    "Rooms of one floor never import each other."
)
WIDTH = 500.0
ALONE, PAIRED = 58, 35  # Characters of a line.


def floor_height(names: list[str]) -> float:
    """Return the height of a floor's boxes."""
    if len(names) == 1:
        return 16 + 15.0 * len(wrap(purpose(names[0]), ALONE))
    return 33 + 15.0 * max([len(wrap(purpose(name), PAIRED)) for name in names])


def architecture() -> None:
    """Draw the contracts of import-linter."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rooms, inner = config["tool"]["importlinter"]["contracts"]
    floors = [[name.strip() for name in row.split("|")] for row in rooms["layers"]]
    parts: list[str] = []
    y, left, width = 8.0, 32.0, WIDTH
    at_processes = 0.0
    for number, names in enumerate(floors):
        height = floor_height(names)
        level = str(len(floors) - 1 - number)
        parts.append(text(left - 14, y + height / 2 + 4, level, "soft end"))
        parts.append(rect(left - 6, y - 4, width + 12, height + 8, "band", 7))
        share = (width - 10 * (len(names) - 1)) / len(names)
        for index, name in enumerate(names):
            x = left + index * (share + 10)
            room(parts, name, x, y, (share, height))
        if "processes" in names:
            at_processes = y + height / 2
        if number + 1 < len(floors):
            x = left + width / 2
            parts.append(arrow(x, y + height + 4, x, y + height + 14.5))
        y += height + 19
    x, w = left + width + 34, 176.0
    rows = [row.replace("|", ":").split(":") for row in inner["layers"]]
    lists = [wrap(", ".join(map(str.strip, row)), 22) for row in rows]
    tall = sum(28 + 15.0 * (len(lines) - 1) for lines in lists) + 16 * len(rows) - 16
    here = at_processes - tall / 2
    parts.append(text(x + w / 2, here - 10, "within processes/", "bold mid"))
    parts.append(
        f'<path d="M {left + width:g} {at_processes:g} H {x:g}" class="line dash"/>'
    )
    for index, lines in enumerate(lists):
        height = 28 + 15.0 * (len(lines) - 1)
        parts.append(rect(x, here, w, height, "box"))
        for number, line in enumerate(lines):
            parts.append(text(x + w / 2, here + 18 + 15 * number, line, "mono mid"))
        here += height
        if index + 1 < len(lists):
            parts.append(arrow(x + w / 2, here, x + w / 2, here + 15.5))
        here += 16
    for number, line in enumerate(wrap(RULE, 26)):
        parts.append(text(x + w / 2, 28 + 17 * number, line, "soft mid"))
    title = "The rooms of jdag and their allowed imports"
    write("architecture", title, x + w + 6, y - 8, parts)


# ------------------------------------------------------------------- sequence diagrams


@dataclass
class Sequence:
    """A sequence diagram. Time goes down; each method adds a row."""

    names: list[tuple[str, str]]  # Name and role of each lifeline.
    apart: float = 232
    left: float = 178
    y: float = 70
    parts: list[str] = field(default_factory=list)
    bands: list[tuple[float, str]] = field(default_factory=list)
    boxes: list[str] = field(default_factory=list)

    def x(self, index: int) -> float:
        """Return the place of a lifeline."""
        return self.left + index * self.apart

    def phase(self, name: str) -> None:
        """Begin a phase. After a `|`, its name goes on in another line."""
        self.bands.append((self.y, name))
        self.y += 8

    def note(self, *notes: tuple[int, str]) -> None:
        """Write notes on lifelines, side by side. A `|` in a text begins a new line."""
        most = max(note.count("|") + 1 for _, note in notes)
        for index, note in notes:
            lines = note.split("|")
            w, h = max(map(len, lines)) * 6.3 + 18, 16 * len(lines) + 8
            x = self.x(index) - w / 2
            self.boxes.append(rect(x, self.y, w, h, "box"))
            for number, line in enumerate(lines):
                at = self.y + 16 + 16 * number
                self.boxes.append(text(self.x(index), at, line, "soft mid"))
        self.y += 16 * most + 20

    def send(self, source: int, target: int, label: str, kind: str = "line") -> None:
        """Draw an arrow between two lifelines."""
        self.y += 14
        sign = 1 if target > source else -1
        x1, x2 = self.x(source) + 3 * sign, self.x(target) - 3 * sign
        self.parts.append(arrow(x1, self.y, x2, self.y, kind))
        first = self.x(source) if sign > 0 else self.x(source) - self.apart
        self.parts.append(text(first + self.apart / 2, self.y - 6, label, "mid halo"))
        self.y += 12

    def draw(self, name: str, title: str) -> None:
        """Write the diagram."""
        w = self.x(len(self.names) - 1) + 104
        h = self.y + 10
        under = []
        ends = [y for y, _ in self.bands[1:]] + [h]
        for number, ((y, phase), end) in enumerate(zip(self.bands, ends, strict=True)):
            kind = "band" if number % 2 == 0 else "band2"
            under.append(rect(0, y, w, end - y, kind, 0))
            for row, line in enumerate(phase.split("|")):
                under.append(
                    text(12, y + 20 + 16 * row, line, "bold" if not row else "soft")
                )
        for index, (label, role) in enumerate(self.names):
            x = self.x(index)
            under.append(text(x, 22, label, "bold mid"))
            under.append(text(x, 40, role, "soft mid"))
            under.append(f'<path d="M {x:g} 50 V {h:g}" class="line"/>')
        write(name, title, w, h, under + self.parts + self.boxes)


def life_of_a_pass() -> None:
    """Draw the messages of a context with one pass."""
    a, b, c = range(3)
    s = Sequence([("a", "owner of the context"), ("b", "leaf w"), ("c", "loss")])
    s.phase("record")
    s.note((a, 'ctx.call("b", f, w, x)|ctx.call("c", g, h)'))
    s.send(a, b, "Call f, Ship h to c")
    s.note((b, "node f, send of h"))
    s.send(a, c, "Call g")
    s.note((c, "recv of h, node g"))
    s.send(b, c, "Primal h", "go")
    s.send(b, a, "header: 2 handled", "line dash")
    s.send(c, a, "header: 1 handled", "line dash")
    s.phase("gather")
    s.note((a, "ctx.backward(loss)|all calls are handled: begin"))
    s.phase("mark|SMART only")
    s.send(a, c, "Start (root)")
    s.note((c, "counts g and the|recv of h; needs h"))
    s.send(c, b, "Mark h")
    s.note((b, "counts f and w;|one cotangent is owed"))
    s.send(b, a, "Answer (1 owed)")
    s.note((a, "holds the whole credit"))
    s.phase("run")
    s.send(a, c, "Go")
    s.note((c, "seeds the root, vjp of g"))
    s.send(c, b, "Cotangent of h", "back")
    s.note((b, "vjp of f, stages|the gradient of w"))
    s.send(b, a, "Answer (0 owed)")
    s.note((a, "holds the whole; none owed"))
    s.phase("end")
    s.send(a, b, "End (finished)")
    s.send(a, c, "End (finished)")
    s.note((b, "commits"), (c, "commits"))
    s.send(b, a, "Ended")
    s.send(c, a, "Ended")
    s.note((a, "backward returns"))
    s.phase("leave")
    s.send(a, b, "Release")
    s.send(a, c, "Release")
    s.note((b, "forgets, when quiet"), (c, "forgets, when quiet"))
    s.send(b, a, "Released")
    s.send(c, a, "Released")
    s.draw("life-of-a-pass", "The messages of a context with one SMART pass")


def life_of_a_step() -> None:
    """Draw the frames of two steps of a plan."""
    a, b, c = range(3)
    s = Sequence([("a", "owner of the plan"), ("b", "leaf w"), ("c", "leaf v")])
    s.phase("step 1")
    s.note((a, "step(x)"))
    s.send(a, b, "begins step 1, base 0: x")
    s.send(a, c, "begins step 1, base 0")
    s.note((b, "reads w; its row is ready:|y = f(w, x)"), (c, "reads v; waits for y"))
    s.send(b, c, "y", "go")
    s.note((c, "forward and backward of g|in one executable; stages v'"))
    s.send(c, a, "loss", "go")
    s.send(c, b, "cotangent of y", "back")
    s.send(c, a, "report")
    s.note((b, "backward of f; stages w'"))
    s.send(b, a, "report")
    s.note((a, "all have reported: step returns|the step is staged"))
    s.phase("step 2")
    s.note((a, "step(x)"))
    s.send(a, b, "begins step 2, base 1: x")
    s.send(a, c, "begins step 2, base 1")
    s.note((b, "commits w' of step 1;|reads it"), (c, "commits v' of step 1;|reads it"))
    s.draw("life-of-a-step", "The frames of two steps of a plan")


if __name__ == "__main__":
    architecture()
    life_of_a_pass()
    life_of_a_step()

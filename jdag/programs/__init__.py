"""Ready programs that scenarios may name, and what a scenario's program is.

A scenario names `module:function`. jdag calls that function with the workers and the
scenario's `[settings]` by keyword; it returns what is to be played:

    from jdag.programs import Case

    def chain(workers, *, length: int = 4) -> Case:
        def program(ctx, params):
            ...                      # calls, as in any context
            return loss              # a ref, or a list of refs: the roots

        return Case(program, params={"w": array}, placement={"w": workers[1]})

A `Case` is one context with one pass; jdag runs it for each seed, holds it against the
oracle and counts. For more control return any object with `figures` (name to what it
is) and `play(run)`, which returns those figures; see `jdag.programs.digits`.
"""

from jdag.programs.case import Case, Figures, Player, Run

__all__ = ["Case", "Figures", "Player", "Run"]

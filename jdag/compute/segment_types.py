"""Types of the results of a segment's nodes, and bytes of their residuals."""

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

from jdag.compute.halves import halves
from jdag.compute.pairs import input_types, output_types
from jdag.engine.segments import NodeKind, SegmentNode


class Carried(NamedTuple):
    """Bytes of the residuals that one segment passes to a later one (a bundle).

    `nbytes` counts neither arguments nor outputs of calls. `nbytes_most` counts both,
    except arguments that are inputs of the segment, whose positions are `inputs`.
    """

    nbytes: int
    nbytes_most: int
    inputs: tuple[int, ...]


def types_of(
    node: SegmentNode, pairs: Sequence[Any], types: Sequence[Any]
) -> list[Any]:
    """Check a node's inputs. Return the types of its results; for residuals, None."""
    first, *rest = [[types[number] for number in slots] for slots in node.inputs]
    pair: Any = pairs[node.pair] if pairs else None
    results: Sequence[Any]
    match node.kind:
        case NodeKind.FORWARD:
            results = output_types(pair)
            both = zip(first, pair.avals, strict=True)
            fits = not rest and all([a in (aval, aval.strong) for a, aval in both])
        case NodeKind.VJP | NodeKind.INPUTS:
            results = input_types(pair)
            if node.kind is NodeKind.INPUTS:
                results = halves(pair, node.weights).input_avals
            outputs = compress(pair.out_avals, pair.out_tracked)
            sides = zip(rest, outputs, strict=True)
            fits = first == [None] and all([{*a} <= {aval} for a, aval in sides])
        case NodeKind.WEIGHTS:
            results = halves(pair, node.weights).weight_avals
            fits = first == [None] and not rest
        case NodeKind.SUM | NodeKind.FILL:
            results = first[-1:]
            fits = {*first} == {first[0]} and not rest
    if not fits:
        raise ValueError(f"the input types of a segment's node do not match: {node}")
    strong = [aval.strong for aval in results]
    keeps = node.kind is NodeKind.FORWARD and node.keeps
    return [*strong, None] if keeps or node.kind is NodeKind.INPUTS else strong


def carried_by(
    node: SegmentNode, pairs: Sequence[Any], arrays: int, exact: bool
) -> Carried:
    """Return the sizes of a FORWARD node's residuals, or of an INPUTS node's stash.

    `arrays` is the number of input arrays of the segment; if `exact`, a cotangent may
    have several addends.
    """
    pair = pairs[node.pair]
    if node.kind is NodeKind.INPUTS:
        node_halves = halves(pair, node.weights)
        counts = [len(some) if exact else min(len(some), 1) for some in node.inputs]
        cut = node_halves.cut(tuple(counts[1:]))
        avals = [node_halves.input_avals[place] for place in cut.results_kept]
        avals += [pair.avals[place] for place in cut.args_kept]
        avals += [pair.out_avals[place] for place in cut.outputs_kept]
        nbytes, read = cut.stash_bytes, []
    else:
        read = [node.inputs[0][place] for place in pair.args_kept]
        both = zip(read, pair.args_kept, strict=True)
        avals = [pair.avals[place] for name, place in both if name >= arrays]
        avals += [pair.out_avals[place] for place in pair.outputs_kept]
        nbytes = pair.residual_bytes
    nbytes_max = nbytes + sum([aval.nbytes for aval in avals])
    return Carried(nbytes, nbytes_max, tuple([name for name in read if name < arrays]))

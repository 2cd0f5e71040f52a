"""A module of functions and classes, some of which other processes may have by name."""

import os
import sys
from dataclasses import dataclass
from enum import Enum
from math import sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jdag

__all__ = ["jit", "os", "sqrt", "sys"]

RAN: list[str] = []


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(w @ x)


def _private(x: Any) -> Any:
    return x + 1


@jax.jit
def jit(x: Any) -> Any:
    return x * 2


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


class Colour(Enum):
    RED = 1


class Pair(NamedTuple):
    a: Any
    b: Any


class Loud(NamedTuple):
    a: Any

    def __repr__(self) -> str:
        RAN.append("repr")
        return "Loud"


@dataclass(frozen=True)
class Frozen:
    width: int

    def __post_init__(self) -> None:
        RAN.append("post_init")

    def doubled(self, x: Any) -> Any:
        return x * 2 * self.width

    @staticmethod
    def fixed(x: Any) -> Any:
        return x + 3

    @classmethod
    def of(cls, x: Any) -> Any:
        return x + 4


class Effect:
    def __init__(self, *args: Any) -> None:
        RAN.append("init")

    def __new__(cls, *args: Any) -> "Effect":
        RAN.append("new")
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        RAN.append("setstate")

    def __call__(self) -> None:
        RAN.append("call")


class Impostor:
    __qualname__ = "system"
    __module__ = "tests.tools.names_cases"

    def __call__(self) -> None:
        RAN.append("impostor")


system = os.system
alias = layer
impostor = Impostor()


def _made() -> Any:
    def inner(x: Any) -> Any:
        return x

    return inner


inner = _made()
nameless = lambda x: x  # noqa: E731


@jdag.program
def program(ctx: Any, worker: str, w: Any) -> Any:
    return ctx.call(worker, jnp.tanh, w)

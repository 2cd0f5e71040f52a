"""What exceptions say in messages, whatever their classes are."""

from typing import cast

import pytest

from jdag.errors import SAID_MAX, JdagError, is_deeper, is_own, named_text, unusable


class Odd(JdagError):
    """Its text is what it was made of, or fails as that says."""

    def __str__(self) -> str:
        match self.args[0]:
            case BaseException() as error:
                raise error
            case int():
                return cast(str, self.args[0])  # A TypeError: it is no text.
            case _:
                return str(self)


@pytest.mark.parametrize(
    ("held", "kind"),
    [
        (ValueError("no"), "ValueError"),
        (SystemExit(3), "SystemExit"),
        (5, "TypeError"),
        (None, "RecursionError"),
    ],
)
def test_an_exception_whose_str_raises_has_a_text_that_says_so(held, kind):
    assert named_text(Odd(held)) == f"Odd: its __str__ raises {kind}"


def test_ctrl_c_is_no_text():
    with pytest.raises(KeyboardInterrupt):
        named_text(Odd(KeyboardInterrupt()))


def test_a_long_text_is_cut():
    assert len(named_text(ValueError("x" * 10 * SAID_MAX))) < SAID_MAX + 100


def test_a_class_that_users_derive_is_theirs():
    assert is_own(JdagError("it"))
    assert not is_own(Odd(5)) and not is_own(ValueError("it"))


def test_a_setting_without_a_repr_is_named_by_what_it_is():
    class Shy:
        def __repr__(self) -> str:
            raise ValueError("no")

    assert unusable("seed", Shy(), "a string") == "seed = a Shy: expected a string"


def test_a_long_number_is_shown_by_its_ends():
    message = unusable("seed", 10**400, "a string")
    assert message.startswith("seed = 1000") and len(message) < 200


def test_what_is_as_deep_as_allowed_is_not_deeper():
    def parts(values):
        return [one for value in values if isinstance(value, list) for one in value]

    assert not is_deeper([[1, 2], 3], 3, parts)
    assert is_deeper([[1, 2], 3], 2, parts)

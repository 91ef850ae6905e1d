"""The tree of errors, as the head of their module draws it."""

import inspect

from paceline.core import errors


def test_the_tree_has_every_error() -> None:
    lines = (errors.__doc__ or "").splitlines()
    drawn = [line.split("── ")[1].split()[0] for line in lines if "── " in line]
    made = [
        each.__name__
        for _, each in inspect.getmembers(errors, inspect.isclass)
        if issubclass(each, errors.PacelineError) and each is not errors.PacelineError
    ]
    assert sorted(drawn) == sorted(made)

"""Every example in a docstring of phloem.radix runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import phloem.radix

MODULES = [
    "phloem.radix",
    *(f"phloem.radix.{module.name}" for module in pkgutil.iter_modules(phloem.radix.__path__)),
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_module_hold(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_public_face_has_examples():
    assert doctest.testmod(phloem.radix).attempted >= 4

"""The program in the process of the tests."""

from tests.cli.conftest import run

__all__ = ["run"]

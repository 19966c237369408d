"""Imports torch and what engines need, for the tests' fork server.

A server imports this module first: the libraries read environment variables that
`prepare_environment` sets.
"""

from services.engine.process import import_libraries, prepare_environment

prepare_environment()
import_libraries()

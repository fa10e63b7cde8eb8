"""Needs a module that nobody has."""

from kvbench_plugin_fixture import module_that_is_missing

NoImport = module_that_is_missing.NoImport

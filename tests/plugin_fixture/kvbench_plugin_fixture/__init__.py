"""Policies of a third party, for the tests of the plugin door."""

"""Finds the fastest setting of a model on this machine within a limit of quality. One search is one folder."""

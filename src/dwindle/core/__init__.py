"""Errors, files, sizes, progress and configuration: what every room uses, and nothing about models."""

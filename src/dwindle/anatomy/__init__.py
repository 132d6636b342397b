"""Model families as data: which axis of which tensor counts heads, FFN channels, hidden indices or tokens."""

from dwindle.anatomy.anatomy import Anatomy, ParameterCount, Row, cut
from dwindle.anatomy.families import FAMILIES, Family, family_of
from dwindle.anatomy.structure import KINDS, Group, Kind, Layer, Structure

__all__ = [
    "FAMILIES",
    "KINDS",
    "Anatomy",
    "Family",
    "Group",
    "Kind",
    "Layer",
    "ParameterCount",
    "Row",
    "Structure",
    "cut",
    "family_of",
]

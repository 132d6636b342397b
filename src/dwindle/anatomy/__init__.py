"""What a model is made of: which axis of which tensor counts heads, channels or hidden indices, as data."""

from dwindle.anatomy.anatomy import Anatomy, ParameterCount, Row
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
    "family_of",
]

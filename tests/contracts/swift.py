"""What ms-swift makes callbacks with."""

from tests.contracts.contract import find

find("deltawire.frameworks.swift:publish_to")("memory://contract")

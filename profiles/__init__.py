"""Shipped model profiles and cluster descriptions, addressable by bare name."""

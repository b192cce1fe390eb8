"""What surrounds the project: set-up, servers and workers (README.md), backups, pictures and site of the documents.

The only package here is :mod:`infra.embedded`, which makes the shipped base models.
"""

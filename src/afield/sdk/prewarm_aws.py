"""Imported in a warm parent, it makes deliveries to S3 and SQS cheap in every process forked from it."""

from afield.sdk.s3_store import warm

warm()

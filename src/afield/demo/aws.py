"""Local S3 and SQS server (moto): `python -m afield.demo.aws PORT BUCKET`.

Exits when its standard input closes.
"""

from __future__ import annotations

import logging
import sys


def main() -> None:
    from moto.server import ThreadedMotoServer

    from afield.sdk.stores import aws_client

    port, bucket = int(sys.argv[1]), sys.argv[2]
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    aws_client("s3", endpoint=f"http://127.0.0.1:{port}", region="us-east-1").create_bucket(Bucket=bucket)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()

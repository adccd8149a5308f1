#!/bin/sh
set -e
mkdir -p /data/csv
find /data/inbox -name '*.tmp' -delete
find /data/inbox -name '*.csv' -exec mv {} /data/csv/ \;
rmdir /data/inbox/deep

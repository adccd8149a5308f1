#!/bin/bash
ln -sfn releases/1.10 current
ln -s /app/releases/1.9 old

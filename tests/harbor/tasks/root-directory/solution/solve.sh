#!/bin/bash
mkdir -p /answers
echo welcome > /etc/motd
echo one > /var/lib/notes/1.txt
echo two > /answers/2.txt

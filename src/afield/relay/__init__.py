"""Relay: agents reach gateways and engines that accept no inbound connections.

Agents send HTTP requests to the relay (`server`). Gateways dial out to it (`client`) over one WebSocket per
process, which carries all requests as flow-controlled streams (`streams`) and is resumed after an outage.
"""

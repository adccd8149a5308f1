"""Local AgentCore server: the AWS Bedrock AgentCore API on this machine."""

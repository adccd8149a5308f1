"""Best-of-n reward of an agent: rollouts against a gateway, without training.

    afield gateway --model path/to/hf-model            # prints its address and admin key
    AFIELD_ADMIN_KEY=... python best_of.py http://127.0.0.1:8400 --rollouts 4

Started again with the same --name, it resumes: finished rollouts are not run again.
"""

import argparse

import openai

import afield

QUESTIONS = [
    {"id": "lamp", "question": "What does a lamp cost?", "answer": "12"},
    {"id": "chair", "question": "What does a chair cost?", "answer": "30"},
]


@afield.agent
def shopper(task: dict, rollout: afield.Context) -> float:
    with openai.OpenAI(base_url=rollout.openai_base_url, api_key=rollout.api_key) as client:
        question = [{"role": "user", "content": task["question"]}]
        reply = client.chat.completions.create(model=rollout.model_id, messages=question, max_tokens=64)
    return float(task["answer"] in (reply.choices[0].message.content or ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("gateway")
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--name", default="best-of")
    args = parser.parse_args()
    with afield.RolloutClient.open(
        agent=shopper, gateway=args.gateway, exp_id=args.name, attempt_timeout_s=60
    ) as client:
        for group in client.run_groups(QUESTIONS, rollouts=args.rollouts, timeout=600):
            rewards = [f.outcome.reward for f in group.finished if f.outcome.reward is not None]
            tokens = sum(t.owned for f in group.finished for t in f.trajectories)
            if rewards:
                summary = f"mean {sum(rewards) / len(rewards):.2f}, best {max(rewards):.2f}"
            else:
                summary = f"no reward: {group.unusable_because(1)}"
            print(f"{group.task_id}: {summary}; {len(rewards)} of {args.rollouts} rollouts, {tokens} tokens")


if __name__ == "__main__":
    main()

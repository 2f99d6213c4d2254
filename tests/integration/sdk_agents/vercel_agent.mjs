import { execSync } from "node:child_process";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { z } from "zod";

const { OPENAI_MODEL, OPENAI_API_KEY, OPENAI_BASE_URL, AGENT_API } = process.env;
const provider = createOpenAICompatible({ name: "g", apiKey: OPENAI_API_KEY, baseURL: OPENAI_BASE_URL });
const bash = ai.tool({
  description: "Runs a command.",
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => execSync(command).toString() || "(nothing)",
});
const options = {
  model: provider(OPENAI_MODEL), tools: { bash }, stopWhen: (ai.isStepCount ?? ai.stepCountIs)(10), prompt: process.argv[2],
};
if (AGENT_API === "chat, stream") {
  for await (const _ of ai.streamText(options).textStream);
} else {
  await ai.generateText(options);
}

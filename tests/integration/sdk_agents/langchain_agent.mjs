import { execSync } from "node:child_process";
import { tool } from "@langchain/core/tools";
import { createReactAgent } from "@langchain/langgraph/prebuilt";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const { OPENAI_MODEL, OPENAI_API_KEY, OPENAI_BASE_URL } = process.env;
const configuration = { baseURL: OPENAI_BASE_URL };
const llm = new ChatOpenAI({ model: OPENAI_MODEL, apiKey: OPENAI_API_KEY, configuration, useResponsesApi: false });
const bash = tool(async ({ command }) => execSync(command).toString() || "(nothing)", {
  name: "bash", description: "Runs a command.", schema: z.object({ command: z.string() }),
});
await createReactAgent({ llm, tools: [bash] }).invoke({ messages: [{ role: "user", content: process.argv[2] }] });

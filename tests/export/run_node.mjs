// The greedy continuation and the logits of a prompt in transformers.js: FOLDER DTYPE IDS COUNT
import { AutoModelForCausalLM, AutoTokenizer, Tensor, env } from "@huggingface/transformers";
import path from "node:path";

const [folder, dtype, text, count] = process.argv.slice(2);
env.localModelPath = path.dirname(path.resolve(folder)) + "/";
env.allowRemoteModels = false;
const name = path.basename(folder);
const model = await AutoModelForCausalLM.from_pretrained(name, { dtype });
const tokenizer = await AutoTokenizer.from_pretrained(name);
const inputs = tokenizer(text, { add_special_tokens: false });
const { logits } = await model(inputs);
const output = await model.generate({ ...inputs, max_new_tokens: Number(count), do_sample: false, eos_token_id: -1 });
const ids = (tensor) => Array.from(tensor.data, Number);
console.log(JSON.stringify({ ids: ids(inputs.input_ids), logits: Array.from(logits.data), output: ids(output) }));

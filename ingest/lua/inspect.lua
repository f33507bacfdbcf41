-- Looks whether this user may do what engines do, and whether the shard's shared keys are of the type that they must be.
-- KEYS the keys that all requests share
-- ARGV 1 and 2 channels, 3... the type of each key, then commands: their words with a space between, `<key>` for a key. Each has
--      its keys, since there are servers that die of a question about a command without them
-- Replies what is wrong, one line each
local PUBLISH = 'PUBLISH'
local found = {}

local function look(shown, ...)
  -- Raises where the server knows no such command: it has been renamed.
  local asked, allowed = pcall(redis.acl_check_cmd, ...)
  if not asked or not allowed then found[#found + 1] = shown .. ' is not allowed' end
end

for i = 1, 2 do look(PUBLISH, PUBLISH, ARGV[i], '') end
for i = #KEYS + 3, #ARGV do
  local words = {}
  for word in string.gmatch(ARGV[i], '%S+') do words[#words + 1] = word end
  for place, word in ipairs(words) do
    if word == '<key>' then words[place] = KEYS[1] end
  end
  look(string.match(ARGV[i], '^[A-Z ]*[A-Z]'), unpack(words))
end
for i, key in ipairs(KEYS) do
  local kind = redis.call('TYPE', key).ok
  if kind ~= 'none' and kind ~= ARGV[2 + i] then
    found[#found + 1] = key .. ' is a ' .. kind .. ' and must be a ' .. ARGV[2 + i]
  end
end
return found

// Amounts of money, and budgets of API keys with what is spent.

/** An amount without its currency. Small ones keep the digits that matter: a request costs less than a cent. */
export function amount(value: number): string {
  const digits = Math.abs(value) >= 1 || value === 0 ? 2 : 6;
  return value.toLocaleString(undefined, { minimumFractionDigits: 2, maximumFractionDigits: digits });
}

export const money = (value: number, currency: string): string => `${amount(value)} ${currency}`;

interface KeyList {
  keys: {
    name: string;
    tokens_per_day: number | null;
    tokens_per_month: number | null;
    device_seconds_per_day: number | null;
    device_seconds_per_month: number | null;
    money_per_day: string | null;
    money_per_month: string | null;
  }[];
  spending: Record<
    string,
    {
      day_tokens: number;
      month_tokens: number;
      day_device_s: number;
      month_device_s: number;
      day_money: string;
      month_money: string;
    }
  >;
}

export interface Budget {
  key: string;
  name: string;
  spent: number;
  limit: number;
  format: (value: number) => string;
}

/** List the budgets of keys. Without prices nothing costs, and amounts have no currency. */
export function budgetsOf({ keys, spending }: KeyList, currency: string | null): Budget[] {
  const tokens = (value: number) => value.toLocaleString();
  const seconds = (value: number) => `${value.toLocaleString(undefined, { maximumFractionDigits: 1 })} s`;
  const cost = (value: number) => (currency === null ? amount(value) : money(value, currency));
  return keys.flatMap((k) => {
    const spent = spending[k.name];
    const all: [string, number | string | null, number | string | undefined, (value: number) => string][] = [
      ["tokens of a day", k.tokens_per_day, spent?.day_tokens, tokens],
      ["tokens of a month", k.tokens_per_month, spent?.month_tokens, tokens],
      ["device-seconds of a day", k.device_seconds_per_day, spent?.day_device_s, seconds],
      ["device-seconds of a month", k.device_seconds_per_month, spent?.month_device_s, seconds],
      ["money of a day", k.money_per_day, spent?.day_money, cost],
      ["money of a month", k.money_per_month, spent?.month_money, cost],
    ];
    return all
      .filter(([, limit]) => limit !== null)
      .map(([name, limit, used, format]) => ({ key: k.name, name, spent: Number(used ?? 0), limit: Number(limit), format }));
  });
}
